//! Warnings while a rank is waited for.

use std::{
    io,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::{GroupOptions, ProcessGroup, ReduceOp};
use tracing::Dispatch;

#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Returns the warnings of a rank about rank 2.
    fn of(&self, rank: usize) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        let (begin, end) = (format!(" WARN rank {rank} has waited "), " for rank 2 in ");
        let lines = log
            .lines()
            .map(|line| line.replace("accelerator_collective::transport::deadline: ", ""));
        lines
            .filter(|line| line.contains(&begin) && line.contains(end))
            .collect()
    }
}

/// Repeated warnings name a rank that hangs, with its last operation.
#[test]
fn warnings_name_the_rank_that_is_waited_for_until_it_comes() {
    let options = GroupOptions::new().with_warn_after(Duration::from_millis(50));
    let ranks = ProcessGroup::threads(3, &options).unwrap();
    let log = Log::default();
    let writer = {
        let log = log.clone();
        move || log.clone()
    };
    let subscriber = tracing_subscriber::fmt()
        .with_writer(writer)
        .with_ansi(false);
    let dispatch = Dispatch::new(subscriber.finish());
    thread::scope(|scope| {
        for group in ranks {
            let (dispatch, log) = (dispatch.clone(), log.clone());
            scope.spawn(move || {
                // The dispatch is this thread's, since others of the process belong to other tests.
                let _guard = tracing::dispatcher::set_default(&dispatch);
                group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
                let until = Instant::now() + Duration::from_secs(60);
                while group.rank() == 2 && [0, 1].iter().any(|rank| log.of(*rank).len() < 3) {
                    assert!(Instant::now() < until, "{log:?}");
                    thread::sleep(Duration::from_millis(5));
                }
                group.barrier().unwrap();
            });
        }
    });
    for rank in [0, 1] {
        let last = log.of(rank).pop().unwrap();
        assert!(
            last.contains(" for rank 2 in collective #1, barrier at "),
            "{last}"
        );
        assert!(last.contains("; it gives up after 600 s; "), "{last}");
        let who = "; rank 2 (a thread of this process) was last seen in collective #0, all_reduce sum f32 x 1 at ";
        assert!(last.contains(who), "{last}");
    }
}
