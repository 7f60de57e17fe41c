//! The way of started operations to the communication thread, without memory for each of them.

use std::{collections::VecDeque, sync::Arc};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

/// The two ends of a queue. Once one end is gone, the queue is closed: nothing more can be sent,
/// and what was sent before is still received, or dropped with the receiving end.
pub(super) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let queue = Arc::new(JobQueue {
        state: Mutex::new(JobQueueState {
            jobs: VecDeque::new(),
            closed: false,
        }),
        arrival: Condvar::new(),
    });
    (Sender(Arc::clone(&queue)), Receiver(queue))
}

/// The sending end of the queue.
#[derive(Debug)]
pub(super) struct Sender<T>(Arc<JobQueue<T>>);

impl<T> Sender<T> {
    /// Sends a job, or gives it back if nobody will receive it.
    pub(super) fn send(&self, job: T) -> Result<(), T> {
        let mut state = self.0.lock();
        if state.closed {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.0.arrival.notify_one();
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.arrival.notify_one();
    }
}

/// The receiving end of the queue.
#[derive(Debug)]
pub(super) struct Receiver<T>(Arc<JobQueue<T>>);

impl<T> Receiver<T> {
    /// Waits for the next job; none when there will be no more.
    pub(super) fn recv(&self) -> Option<T> {
        let empty = |state: &mut JobQueueState<T>| state.jobs.is_empty() && !state.closed;
        let mut waited = self.0.arrival.wait_while(self.0.lock(), empty);
        waited.jobs.pop_front()
    }

    /// Returns the next job, if it is there.
    pub(super) fn try_recv(&self) -> Option<T> {
        self.0.lock().jobs.pop_front()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        // What they hold may send again.
        drop(jobs);
    }
}

#[derive(Debug)]
struct JobQueue<T> {
    state: Mutex<JobQueueState<T>>,
    arrival: Condvar,
}

impl<T> JobQueue<T> {
    fn lock(&self) -> MutexGuard<'_, JobQueueState<T>> {
        self.state.lock()
    }
}

#[derive(Debug)]
struct JobQueueState<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_received_in_order_to_the_last() {
        let (sender, jobs) = channel();
        assert_eq!(jobs.try_recv(), None);
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!(jobs.try_recv(), Some(1));
        drop(sender);
        assert_eq!(jobs.recv(), Some(2));
        assert_eq!(jobs.recv(), None);
    }

    #[test]
    fn what_nobody_receives_is_given_back_or_dropped() {
        let (sender, jobs) = channel();
        let job = Arc::new(());
        sender.send(Arc::clone(&job)).unwrap();
        drop(jobs);
        assert_eq!(Arc::strong_count(&job), 1);
        assert!(sender.send(job).is_err());
    }
}
