//! Operations that run beside the program, and their way to the communication thread.

use std::{collections::VecDeque, fmt, mem, sync::Arc};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

use crate::{
    buffer::Buffer,
    error::{Error, Kind, Result},
};

/// A reduction that was started and gives its buffer back when it is done.
///
/// Dropping it does not stop the operation, since the other ranks count on it; the buffer and
/// any error are then lost, though a failed group says so at the next operation.
#[must_use = "the result and any error of the operation come from wait()"]
pub struct Pending(Option<Arc<PendingSlot>>);

impl Pending {
    /// Waits until the operation is done and gives the reduced buffer back.
    ///
    /// Operations may be waited for in any order.
    ///
    /// # Errors
    ///
    /// The error of the operation, as of the blocking one; or that of an earlier one, if it failed.
    pub fn wait(mut self) -> Result<Buffer> {
        // Only this method takes it.
        let Some(slot) = self.0.take() else {
            return Err(interrupted());
        };
        let running = |outcome: &mut SlotState| matches!(outcome, SlotState::Running);
        let waited = slot.done.wait_while(slot.lock(), running);
        let mut outcome = waited;
        match mem::replace(&mut *outcome, SlotState::Free) {
            SlotState::Done(result) => result,
            // `wait_while` returned, so it is not running; the other two have no such end.
            SlotState::Abandoned | SlotState::Free | SlotState::Running => Err(interrupted()),
        }
    }

    /// Returns `true` if [`wait`](Self::wait) would return at once.
    pub fn is_ready(&self) -> bool {
        let slot = self.0.as_ref();
        slot.is_none_or(|slot| !matches!(*slot.lock(), SlotState::Running))
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("ready", &self.is_ready())
            .finish()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(slot) = self.0.take() else {
            return;
        };
        let mut outcome = slot.lock();
        let next = match &*outcome {
            SlotState::Running => SlotState::Abandoned,
            SlotState::Abandoned | SlotState::Done(_) | SlotState::Free => SlotState::Free,
        };
        let result = mem::replace(&mut *outcome, next);
        drop(outcome);
        // A buffer takes a while.
        drop(result);
    }
}

/// The end of an operation that knows the result. Dropped without one, it reports an error, so
/// that nobody waits for ever.
#[derive(Debug)]
pub(crate) struct Completion(Option<Arc<PendingSlot>>);

impl Completion {
    pub(crate) fn complete(mut self, result: Result<Buffer>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<Buffer>) {
        let Some(slot) = self.0.take() else {
            return;
        };
        let mut outcome = slot.lock();
        let unwanted = match &*outcome {
            SlotState::Abandoned => {
                *outcome = SlotState::Free;
                Some(result)
            }
            SlotState::Done(_) | SlotState::Free | SlotState::Running => {
                *outcome = SlotState::Done(result);
                None
            }
        };
        drop(outcome);
        drop(unwanted);
        // It may serve another operation already, whose end then looks once more.
        slot.done.notify_all();
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if self.0.is_some() {
            self.end(Err(interrupted()));
        }
    }
}

/// The slots that both ends of started operations share, each for one operation after the other.
#[derive(Debug, Default)]
pub(crate) struct SlotPool(Mutex<Vec<Arc<PendingSlot>>>);

impl SlotPool {
    /// The two ends of one operation.
    pub(crate) fn pair(&self) -> (Pending, Completion) {
        let mut slots = self.0.lock();
        let free = slots.iter().find(|slot| slot.occupy());
        let slot = match free {
            Some(slot) => Arc::clone(slot),
            None => {
                let slot = Arc::new(PendingSlot {
                    outcome: Mutex::new(SlotState::Running),
                    done: Condvar::new(),
                });
                if slots.len() < MAX_FREE_SLOTS {
                    slots.push(Arc::clone(&slot));
                }
                slot
            }
        };
        (Pending(Some(Arc::clone(&slot))), Completion(Some(slot)))
    }
}

#[derive(Debug)]
struct PendingSlot {
    outcome: Mutex<SlotState>,
    done: Condvar,
}

impl PendingSlot {
    /// Takes the slot if it is free, and returns whether it was.
    fn occupy(&self) -> bool {
        let mut outcome = self.lock();
        let free = matches!(*outcome, SlotState::Free);
        if free {
            *outcome = SlotState::Running;
        }
        free
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.outcome.lock()
    }
}

#[derive(Debug)]
enum SlotState {
    /// Nobody wants the result.
    Abandoned,
    Done(Result<Buffer>),
    /// No operation has the slot.
    Free,
    Running,
}

fn interrupted() -> Error {
    Error::new(
        Kind::Closed,
        "the operation was given up before it ran; the group's communication thread is gone",
    )
}

/// The most slots that are kept.
const MAX_FREE_SLOTS: usize = 256;

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

    use crate::element::DType;

    #[test]
    fn a_result_is_handed_over() {
        let (pending, completion) = SlotPool::default().pair();
        assert!(!pending.is_ready());
        completion.complete(Ok(Buffer::zeroed(DType::F32, 3)));
        assert!(pending.is_ready());
        assert_eq!(pending.wait().unwrap().len(), 3);
    }

    #[test]
    fn nobody_waits_for_an_operation_that_is_gone() {
        let (pending, completion) = SlotPool::default().pair();
        drop(completion);
        assert!(pending.wait().unwrap_err().is_closed());
    }

    #[test]
    fn a_slot_serves_again_when_both_ends_are_done() {
        let slots = SlotPool::default();
        let used = || slots.0.lock().len();
        let (pending, completion) = slots.pair();
        completion.complete(Ok(Buffer::zeroed(DType::F32, 3)));
        pending.wait().unwrap();
        let (pending, completion) = slots.pair();
        assert_eq!(used(), 1);
        // Nobody wants the result, but the operation runs.
        drop(pending);
        let (other, _completion) = slots.pair();
        assert_eq!(used(), 2);
        completion.complete(Ok(Buffer::zeroed(DType::F32, 3)));
        let (pending, completion) = slots.pair();
        assert_eq!(used(), 2);
        assert!(!pending.is_ready() && !other.is_ready());
        drop(completion);
        // It was not waited for.
        drop(pending);
        let (_pending, _completion) = slots.pair();
        assert_eq!(used(), 2);
    }
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
