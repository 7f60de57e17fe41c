//! The rayon pool of the training thread.

use std::sync::Once;

use super::error::warn;

/// Makes this thread a worker of a new rayon pool with as many threads as the current one. Tensor operations then start on
/// this thread and wake only the others. Otherwise this thread sleeps while the global pool computes, and waking it costs
/// more than a small operation.
///
/// Does nothing if rayon has one thread, or on later calls in the same process. The global pool stays separate: other
/// threads, such as loaders, must not depend on this thread to make progress.
pub(crate) fn join_local_pool() {
    static JOINED: Once = Once::new();
    let threads = rayon::current_num_threads();
    if threads > 1 {
        JOINED.call_once(|| join(threads));
    }
}

/// Makes this thread a worker of a new pool, which lives as long as the process.
fn join(threads: usize) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    match pool.use_current_thread().build() {
        Ok(pool) => core::mem::forget(pool),
        // Rayon has made it a worker before it failed to start the others.
        Err(error) if std::error::Error::source(&error).is_some() => warn(&format!(
            "rayon could not start its threads, so operations run on one thread: {error}; raise the limit on threads, or set \
             ACCEL_LOCAL_POOL=0"
        )),
        Err(error) => tracing::debug!("this thread joins no rayon pool: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::join;

    /// The thread can wait for a task that it spawned, and other threads do not depend on it.
    #[test]
    fn a_thread_that_is_a_worker_may_wait_for_the_others() {
        let work = || {
            join(2);
            assert_eq!(rayon::current_thread_index(), Some(0));
            assert_eq!(rayon::current_num_threads(), 2);
            let (sender, receiver) = mpsc::channel();
            let loader = thread::spawn(|| rayon::join(|| 1, || 2));
            rayon::spawn(move || sender.send(rayon::current_thread_index()).unwrap());
            let spawned = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(spawned, Some(1));
            assert_eq!(loader.join().unwrap(), (1, 2));
            assert_eq!(rayon::join(|| 3, || 4), (3, 4));
            // A second call keeps the first pool.
            join(2);
            assert_eq!(rayon::current_num_threads(), 2);
        };
        thread::spawn(work).join().unwrap();
    }
}
