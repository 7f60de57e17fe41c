//! Reading threads wait while operations read.

use std::sync::{Arc, mpsc};
use std::thread;

use crate::transport::tcp::*;

/// Reading threads; each sends a message when it has its turn.
fn readers(handoff: &Arc<ReaderHandoff>) -> mpsc::Receiver<()> {
    let (sender, turns) = mpsc::channel();
    for _ in 0..READERS {
        let (handoff, sender) = (Arc::clone(handoff), sender.clone());
        thread::spawn(move || {
            handoff.wait_for_turn();
            // The receiver is gone only where the test has failed already.
            let _ = sender.send(());
        });
    }
    turns
}

fn assert_all(turns: &mpsc::Receiver<()>) {
    for _ in 0..READERS {
        turns.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}

#[test]
fn every_reading_thread_has_its_turn_when_operations_leave() {
    let handoff = Arc::new(ReaderHandoff::new());
    let (first, second) = (handoff.enter(), handoff.enter());
    let turns = readers(&handoff);
    drop(first);
    assert!(turns.recv_timeout(3 * NAP).is_err());
    drop(second);
    assert_all(&turns);
}

#[test]
fn reading_threads_do_not_wait_where_no_operation_will_come() {
    let handoff = Arc::new(ReaderHandoff::new());
    let _polling = handoff.enter();
    let turns = readers(&handoff);
    handoff.end();
    assert_all(&turns);
}

const READERS: usize = 8;
