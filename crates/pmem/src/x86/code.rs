//! Tests of the disassembled routines: a program cannot observe whether a line has reached memory, but it can check whether
//! the routine contains the instructions for that.

use super::*;
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use std::collections::BTreeSet;

/// The instructions of a routine up to its end.
fn instructions(routine: *const ()) -> Vec<Instruction> {
    /// An upper bound of the length of a routine in bytes.
    const LENGTH: usize = 1024;
    // SAFETY: the bytes are code of this program, which is mapped readable; more code follows the routines.
    let code = unsafe { core::slice::from_raw_parts(routine.cast::<u8>(), LENGTH) };
    let mut found = Vec::new();
    for instruction in Decoder::with_ip(64, code, routine as u64, DecoderOptions::NONE) {
        found.push(instruction);
        if instruction.code() == Code::Retnq {
            return found;
        }
    }
    panic!("a routine without an end");
}

/// The accesses of a routine between two changes of its destination, by line from the destination.
#[derive(Default, Debug)]
struct Step {
    stored: BTreeSet<u64>,
    stored_past_caches: BTreeSet<u64>,
    written_back: BTreeSet<u64>,
}

fn steps(routine: *const ()) -> Vec<Step> {
    let mut steps = vec![Step::default()];
    for instruction in instructions(routine) {
        let step = steps.last_mut().expect("there is one");
        let is_destination = instruction.memory_base() == Register::RDI;
        let line = instruction.memory_displacement64() / 64;
        match instruction.mnemonic() {
            Mnemonic::Movntdq | Mnemonic::Vmovntdq if is_destination => {
                step.stored_past_caches.insert(line);
            }
            Mnemonic::Movdir64b => {
                step.stored_past_caches.insert(0);
            }
            Mnemonic::Clwb | Mnemonic::Clflushopt | Mnemonic::Clflush => {
                step.written_back.insert(line);
            }
            Mnemonic::Add if instruction.op0_register() == Register::RDI => steps.push(Step::default()),
            _ if is_destination && instruction.op0_kind() == OpKind::Memory => {
                step.stored.insert(line);
            }
            _ => {}
        }
    }
    steps
}

#[test]
fn write_back_routines_leave_no_line_in_the_caches() {
    let past_caches: [*const (); 6] = [
        store_nt_zmm as *const (),
        store_nt_ymm as *const (),
        store_nt_xmm as *const (),
        store_movdir64b as *const (),
        sum_nt_zmm as *const (),
        sum_nt_xmm as *const (),
    ];
    let written_back: [*const (); 8] = [
        store_clwb_zmm as *const (),
        store_clwb_xmm as *const (),
        store_clflushopt_xmm as *const (),
        store_clflush_xmm as *const (),
        sum_clwb_zmm as *const (),
        sum_clwb_xmm as *const (),
        sum_clflushopt_xmm as *const (),
        sum_clflush_xmm as *const (),
    ];
    for (number, routine) in past_caches.into_iter().chain(written_back).enumerate() {
        let steps = steps(routine);
        let mut lines = 0;
        for step in &steps {
            assert!(step.stored.is_subset(&step.written_back), "routine {number}: {step:?}");
            lines += step.stored.len() + step.stored_past_caches.len();
        }
        assert!(lines > 0, "routine {number} stores nothing: {steps:?}");
    }
}

#[test]
fn write_back_routines_contain_the_instruction() {
    for routine in [back_clwb as *const (), back_clflushopt as *const (), back_clflush as *const ()] {
        assert!(steps(routine)[0].written_back.contains(&0));
    }
}

#[test]
fn a_fence_is_an_sfence() {
    let fence: fn() = fence;
    assert!(instructions(fence as *const ()).iter().any(|found| found.mnemonic() == Mnemonic::Sfence));
}
