//! What is logged while a rank is waited for.

use std::{
    io,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use accelerator_collective::{GroupOptions, ProcessGroup};
use tracing::Dispatch;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_warning_names_the_ranks_that_are_waited_for() {
    let options = GroupOptions::new().with_warn_after(Duration::from_millis(100));
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
            let dispatch = dispatch.clone();
            scope.spawn(move || {
                // For this thread: others of this process belong to other tests.
                let _guard = tracing::dispatcher::set_default(&dispatch);
                if group.rank() == 2 {
                    thread::sleep(Duration::from_millis(1500));
                }
                group.barrier().unwrap();
            });
        }
    });
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    for rank in [0, 1] {
        let warning = format!("rank {rank} has waited ");
        let warnings: Vec<&str> = log.lines().filter(|x| x.contains(&warning)).collect();
        // Rank 0 may have warned about rank 1 too, which came before rank 2.
        let last = warnings.last().unwrap();
        assert!(
            last.contains("for rank 2 in collective #0, barrier at"),
            "{log}"
        );
        assert!(last.contains("it gives up after 600 s"), "{log}");
        assert!(last.contains(" WARN "), "{log}");
        assert!(warnings.len() <= 2, "one warning a wait: {log}");
    }
}
