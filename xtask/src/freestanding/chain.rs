//! Chains of calls: the sum of the stack frames on the deepest path from an entry point.
//!
//! Invariants: every reference from a function to another one counts as a call, including one through a table of functions. A
//! closure therefore counts in the function that creates it. A tail call (a jump at a function's end) replaces the frame of its
//! function. Recursion counts once, and is listed.
//!
//! Not followed: an indirect call to a function that no function on the path refers to, such as one that a host passes in; the
//! number of indirect calls is listed. Functions that end the thread (panics) are not followed either.

use super::{LIMIT, objdump};
use crate::shell;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Parts of the symbols of functions that end the thread.
const ENDS: [&str; 6] = [
    "9panicking",
    "unwrap_failed",
    "expect_failed",
    "slice_index_fail",
    "handle_alloc_error",
    "raw_vec12handle_error",
];

/// The frame of a function, and the functions that it refers to.
#[derive(Default)]
struct Node {
    frame: usize,
    /// Whether the function belongs to a measured crate.
    is_measured: bool,
    calls: BTreeSet<String>,
    /// Tail calls.
    tails: BTreeSet<String>,
    indirect: usize,
}

/// All functions by their symbols, and the tables of functions.
#[derive(Default)]
pub struct Graph {
    functions: BTreeMap<String, Node>,
    tables: BTreeMap<String, BTreeSet<String>>,
}

/// The deepest chain of calls below some entry points.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The sum of all frames in bytes.
    pub bytes: usize,
    /// The functions from the entry point down, with their frames.
    pub functions: Vec<(String, usize)>,
    /// Every function that the entry points reach.
    pub reached: BTreeSet<String>,
    /// Indirect calls in all functions that the entry points reach.
    pub indirect: usize,
    /// Functions that call themselves, directly or through other functions.
    pub recursive: BTreeSet<String>,
}

/// The state of a function during the search for the deepest chain.
#[derive(Clone)]
enum Depth {
    Open,
    Known(usize, Option<String>, bool),
}

impl Graph {
    /// Reads the functions of the `measured` libraries, and those of `others`, which count only in chains.
    ///
    /// # Errors
    /// When a library cannot be disassembled.
    pub fn read(measured: &[String], others: &[String]) -> Result<Self, String> {
        let mut graph = Self::default();
        let measured = measured.iter().map(|library| (library, true));
        for (library, is_measured) in measured.chain(others.iter().map(|library| (library, false))) {
            let code = objdump(library, &["--disassemble", "--no-show-raw-insn", "--reloc"])?;
            graph.add_code(&code, is_measured);
            graph.add_tables(&objdump(library, &["--reloc"])?);
        }
        Ok(graph)
    }

    /// The frames of the measured functions: symbol and bytes.
    pub fn frames(&self) -> impl Iterator<Item = (&str, usize)> {
        let measured = self.functions.iter().filter(|(_, node)| node.is_measured);
        measured.map(|(symbol, node)| (symbol.as_str(), node.frame))
    }

    fn add_code(&mut self, text: &str, is_measured: bool) {
        let mut function: Option<(Function, Node)> = None;
        let mut is_jump = false;
        for line in text.lines() {
            if let Some((_, symbol)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
                let node = Node { is_measured, ..Node::default() };
                self.add(function.replace((Function::new(symbol), node)));
            } else if let Some((function, node)) = &mut function {
                if let Some((_, relocation)) = line.split_once(": R_X86_64_") {
                    let symbol = symbol_of(relocation);
                    let to = if is_jump { &mut node.tails } else { &mut node.calls };
                    to.insert(symbol.to_owned());
                } else if let Some((_, instruction)) = line.split_once(":\t") {
                    function.add(instruction);
                    is_jump = instruction.starts_with('j');
                    let is_call = instruction.starts_with("call");
                    node.indirect += usize::from(is_call && is_indirect(instruction));
                }
            }
        }
        self.add(function);
    }

    fn add(&mut self, function: Option<(Function, Node)>) {
        let Some((function, mut node)) = function else { return };
        let (symbol, frame) = function.into_frame();
        node.frame = frame;
        // If two libraries hold a copy of a function, the copy with the larger frame counts.
        let known = self.functions.entry(symbol).or_default();
        if known.frame <= node.frame {
            *known = node;
        }
    }

    fn add_tables(&mut self, text: &str) {
        let mut table = None;
        for line in text.lines() {
            if let Some(section) = line.strip_prefix("RELOCATION RECORDS FOR [") {
                table = section.strip_suffix("]:").and_then(|section| section.strip_prefix(TABLES));
            } else if let Some(table) = table
                && let Some((_, symbol)) = line.split_once("R_X86_64_64")
            {
                self.tables.entry(table.to_owned()).or_default().insert(symbol_of(symbol).to_owned());
            }
        }
    }

    /// The deepest chain below the functions whose readable names `is_entry` accepts.
    pub fn deepest(&self, is_entry: impl Fn(&str) -> bool) -> Chain {
        let mut chain = Chain::default();
        let mut known = BTreeMap::new();
        let mut deepest = None;
        for symbol in self.functions.keys().filter(|symbol| is_entry(symbol)) {
            let bytes = self.depth(symbol, &mut known, &mut chain.recursive);
            if bytes > chain.bytes {
                chain.bytes = bytes;
                deepest = Some(symbol.clone());
            }
        }
        chain.indirect =
            known.keys().filter_map(|symbol| self.functions.get(symbol)).map(|node| node.indirect).sum();
        chain.reached = known.keys().cloned().collect();
        while let Some(symbol) = deepest.take() {
            let frame = self.functions.get(&symbol).map_or(0, |node| node.frame);
            let mut is_tail = false;
            if let Some(Depth::Known(_, next, ends)) = known.get(&symbol) {
                deepest.clone_from(next);
                is_tail = *ends;
            }
            chain.functions.push((symbol, if is_tail { 0 } else { frame }));
        }
        chain
    }

    /// The size in bytes of the deepest chain that begins at `symbol`.
    fn depth(
        &self,
        symbol: &str,
        known: &mut BTreeMap<String, Depth>,
        recursive: &mut BTreeSet<String>,
    ) -> usize {
        match known.get(symbol) {
            Some(Depth::Known(bytes, ..)) => return *bytes,
            Some(Depth::Open) => {
                recursive.insert(symbol.to_owned());
                return 0;
            }
            None => {}
        }
        let Some(node) = self.functions.get(symbol) else { return 0 };
        if ENDS.iter().any(|end| symbol.contains(end)) {
            return 0;
        }
        known.insert(symbol.to_owned(), Depth::Open);
        let mut best = (node.frame, None, false);
        for (targets, frame) in [(&node.calls, node.frame), (&node.tails, 0)] {
            for target in targets.iter().flat_map(|target| self.resolve(target)) {
                let bytes = frame + self.depth(target, known, recursive);
                if bytes > best.0 {
                    best = (bytes, Some(target.clone()), frame == 0);
                }
            }
        }
        known.insert(symbol.to_owned(), Depth::Known(best.0, best.1, best.2));
        best.0
    }

    /// The functions to which a reference resolves: the function itself, or those of a table.
    fn resolve<'a>(&'a self, target: &'a String) -> Vec<&'a String> {
        match self.tables.get(target) {
            Some(table) => table.iter().collect(),
            None => vec![target],
        }
    }
}

/// The prefix of the sections that hold tables of functions, and of the symbols of these tables.
const TABLES: &str = ".data.rel.ro.";

/// Whether the operand of a call is a register or memory other than a relocated address.
fn is_indirect(call: &str) -> bool {
    call.contains('*') && !call.contains("*0x0(%rip)")
}

/// The symbol of a relocation, as in `PLT32\tname-0x4`.
fn symbol_of(relocation: &str) -> &str {
    let symbol = relocation.split_whitespace().last().unwrap_or_default();
    let end = symbol.rfind("-0x").or_else(|| symbol.rfind("+0x")).unwrap_or(symbol.len());
    let symbol = &symbol[..end];
    [".text.unlikely.", ".text.", TABLES].iter().find_map(|part| symbol.strip_prefix(part)).unwrap_or(symbol)
}

/// Demangles symbols through c++filt (binutils).
///
/// # Errors
/// When c++filt cannot be run.
pub fn readable(symbols: &[&str]) -> Result<Vec<String>, String> {
    if symbols.is_empty() {
        return Ok(Vec::new());
    }
    let text = shell::output_of(Command::new("c++filt").args(symbols), LIMIT)
        .map_err(|end| format!("c++filt: {end}"))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The stack use of a function.
struct Function {
    name: String,
    /// The registers that the function saves; it saves each register once on each path.
    saved: BTreeSet<String>,
    bytes: usize,
}

impl Function {
    fn new(name: &str) -> Self {
        // The return address.
        Self { name: name.to_owned(), saved: BTreeSet::new(), bytes: 8 }
    }

    fn add(&mut self, instruction: &str) {
        let mut parts = instruction.split_whitespace();
        let (name, operands) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if name.starts_with("push") {
            self.saved.insert(operands.to_owned());
        } else if name.starts_with("sub") && operands.ends_with(",%rsp") {
            self.bytes += hexadecimal(operands.trim_start_matches('$'));
        } else if name == "lea" && operands.ends_with("(%rsp),%r11") && operands.starts_with('-') {
            // The compiler probes the pages of a large frame in a loop. The subtraction in that loop counts one of the pages.
            self.bytes += hexadecimal(operands.trim_start_matches('-')).saturating_sub(4096);
        }
    }

    fn into_frame(self) -> (String, usize) {
        (self.name, self.bytes + 8 * self.saved.len())
    }
}

/// The number at the beginning of `text`, as in `0x1f8,%rsp`; 0 if `text` does not begin with a number.
fn hexadecimal(text: &str) -> usize {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let end = digits.find(|digit: char| !digit.is_ascii_hexdigit()).unwrap_or(digits.len());
    usize::from_str_radix(&digits[..end], 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_from_the_machine_code() {
        let text = "\
x.o:     file format elf64-x86-64

0000000000000000 <<T as a::B>::small>:
       0:\tpush   %rbp
       1:\tpush   %rbx
       2:\tsub    $0x18,%rsp
       6:\tsub    $0x1,%rax
       a:\tret

0000000000000000 <a::paged>:
       0:\tsub    $0x1000,%rsp
       7:\tmovq   $0x0,(%rsp)
       f:\tsub    $0x80,%rsp

0000000000000000 <a::looped>:
       0:\tlea    -0x3000(%rsp),%r11
       8:\tsub    $0x1000,%rsp
       f:\tmovq   $0x0,(%rsp)
      17:\tcmp    %r11,%rsp
      1a:\tjne    8
      1c:\tsub    $0x10,%rsp
";
        let expected =
            [("<T as a::B>::small", 8 + 16 + 24), ("a::paged", 8 + 4224), ("a::looped", 8 + 12288 + 16)];
        let mut graph = Graph::default();
        graph.add_code(text, true);
        let mut frames: Vec<_> = graph.frames().collect();
        frames.sort_by_key(|(_, bytes)| *bytes);
        assert_eq!(frames, expected);
    }

    fn graph() -> Graph {
        let mut graph = Graph::default();
        graph.add_code(
            "\
0000000000000000 <entry>:
       0:\tpush   %rbx
       1:\tcall   *0x0(%rip)        # 7 <entry+0x7>
\t\t\t3: R_X86_64_GOTPCREL\tsmall-0x4
       7:\tcall   *0x18(%rax)
       a:\tlea    0x0(%rip),%rdi        # 11 <entry+0x11>
\t\t\td: R_X86_64_PC32\t.data.rel.ro..Lanon.1-0x4
      11:\tjmp    16 <entry+0x16>
\t\t\t12: R_X86_64_PLT32\tlast-0x4

0000000000000000 <small>:
       0:\tsub    $0x10,%rsp
       4:\tcall   9 <small+0x9>
\t\t\t5: R_X86_64_PLT32\tentry-0x4

0000000000000000 <closure>:
       0:\tsub    $0x100,%rsp
       4:\tcall   9 <closure+0x9>
\t\t\t5: R_X86_64_PLT32\tcore9panicking5panic-0x4

0000000000000000 <core9panicking5panic>:
       0:\tsub    $0x1000,%rsp

0000000000000000 <last>:
       0:\tsub    $0x104,%rsp
",
            true,
        );
        graph.add_tables(
            "\
RELOCATION RECORDS FOR [.data.rel.ro..Lanon.1]:
OFFSET           TYPE              VALUE
0000000000000018 R_X86_64_64       .text.closure

RELOCATION RECORDS FOR [.debug_info]:
0000000000000018 R_X86_64_64       core9panicking5panic
",
        );
        graph
    }

    #[test]
    fn the_deepest_chain_goes_through_tables_but_not_through_what_ends_a_thread() {
        let chain = graph().deepest(|symbol| symbol == "entry");
        let expected = [("entry", 16), ("closure", 8 + 256)].map(|(name, bytes)| (name.to_owned(), bytes));
        assert_eq!(chain.functions, expected);
        assert_eq!((chain.bytes, chain.indirect), (16 + 8 + 256, 1));
        assert_eq!(chain.recursive, ["entry".to_owned()].into());
    }

    #[test]
    fn a_jump_at_the_end_takes_no_frame_of_its_own() {
        let mut graph = graph();
        graph.tables.clear();
        let chain = graph.deepest(|symbol| symbol == "entry");
        assert_eq!(chain.functions, [("entry".to_owned(), 0), ("last".to_owned(), 8 + 260)]);
        assert_eq!(chain.bytes, 8 + 260);
    }
}
