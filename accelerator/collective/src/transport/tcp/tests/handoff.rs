//! The reading thread waits while operations read.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::transport::tcp::*;

/// Returns what a reading thread sends when it has its turn.
fn reader(handoff: &Arc<ReaderHandoff>) -> mpsc::Receiver<()> {
    let (sender, turn) = mpsc::channel();
    let handoff = Arc::clone(handoff);
    thread::spawn(move || {
        handoff.wait_for_turn();
        // The receiver is gone only if the test has failed already.
        let _ = sender.send(());
    });
    turn
}

#[test]
fn the_reading_thread_has_its_turn_when_operations_leave() {
    let handoff = Arc::new(ReaderHandoff::new());
    let (first, second) = (handoff.enter(), handoff.enter());
    let turn = reader(&handoff);
    drop(first);
    assert!(turn.recv_timeout(3 * NAP).is_err());
    drop(second);
    turn.recv_timeout(Duration::from_secs(30)).unwrap();
}

#[test]
fn the_reading_thread_does_not_wait_if_no_operation_will_come() {
    let handoff = Arc::new(ReaderHandoff::new());
    let _polling = handoff.enter();
    let turn = reader(&handoff);
    handoff.end();
    turn.recv_timeout(Duration::from_secs(30)).unwrap();
}
