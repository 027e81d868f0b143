//! Which requests pass, and how often the first write is recorded.

use super::*;
use crate::tests::Still;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicUsize};

fn kind(result: Result<()>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

#[test]
fn the_first_write_is_recorded_once_before_it_passes_and_again_only_after_an_error() {
    let gate = Gate::<Still>::new();
    assert_eq!((kind(gate.check_running()), kind(gate.check_writable())), (None, None));
    let (calls, fails) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    let (counted, is_failing) = (Arc::clone(&calls), Arc::clone(&fails));
    gate.before_first_write(Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        if is_failing.load(Ordering::Relaxed) { Err(Error::new(ErrorKind::System, "no")) } else { Ok(()) }
    }));
    assert_eq!((kind(gate.check_running()), calls.load(Ordering::Relaxed)), (None, 0), "a read is no write");
    assert_eq!([kind(gate.check_writable()), kind(gate.check_writable())], [Some(ErrorKind::System); 2]);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    fails.store(false, Ordering::Relaxed);
    assert_eq!([kind(gate.check_writable()), kind(gate.check_writable())], [None; 2]);
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    assert_eq!(gate.bits.load(Ordering::Relaxed), 0, "later writes take the short way");
    assert!(gate.first_write.lock().is_none(), "what the callback holds is freed");
    gate.stop();
    let stopped = Some(ErrorKind::Stopped);
    assert_eq!((kind(gate.check_running()), kind(gate.check_writable())), (stopped, stopped));
}

#[test]
fn a_stopped_cache_records_no_first_write_and_an_abandoned_one_is_stopped() {
    let gate = Gate::<Still>::new();
    gate.before_first_write(Box::new(|| panic!("nothing is written")));
    assert!(!gate.is_abandoned());
    gate.abandon();
    assert!(gate.is_abandoned());
    assert_eq!(kind(gate.check_writable()), Some(ErrorKind::Stopped));
}

#[test]
fn a_closed_gate_holds_a_write_up_until_it_is_open_and_no_read() {
    extern crate std;
    let gate = Gate::<Still>::new();
    let closed = gate.close();
    assert_eq!(kind(gate.check_running()), None);
    let passed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(kind(gate.check_writable()), None);
            passed.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!passed.load(Ordering::SeqCst));
        drop(closed);
    });
    assert!(passed.load(Ordering::SeqCst));
    assert_eq!(gate.bits.load(Ordering::Relaxed), 0, "later writes take the short way");
    drop(gate.close());
    gate.stop();
    drop(gate.close());
    assert_eq!(kind(gate.check_writable()), Some(ErrorKind::Stopped), "an open gate may still refuse");
}
