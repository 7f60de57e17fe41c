//! Operations that run beside the program, their way to the communication thread, and the order in which the operations
//! of one rank run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, mem};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

use super::flight_recorder::WaitClock;
use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// An operation on a buffer that was started, and gives the buffer back when it is done.
///
/// Dropping it does not stop the operation, since the other ranks count on it. The buffer and any error are then lost,
/// but if the group has failed, its next operation returns an error.
#[must_use = "the result and any error of the operation come from wait()"]
pub struct Pending(Option<Arc<PendingSlot>>);

impl Pending {
    /// Waits until the operation is done and gives the buffer back.
    ///
    /// Operations may be waited for in any order.
    ///
    /// # Errors
    ///
    /// The error that the blocking operation would return, or the error of an earlier operation, if one failed.
    pub fn wait(mut self) -> Result<Buffer> {
        // Only this method takes it.
        let Some(slot) = self.0.take() else {
            return Err(interrupted());
        };
        let running = |outcome: &mut SlotState| matches!(outcome, SlotState::Running);
        let mut outcome = slot.outcome.lock();
        if running(&mut outcome) {
            let began = Instant::now();
            outcome = slot.done.wait_while(outcome, running);
            slot.waited.add(began.elapsed());
        }
        match mem::replace(&mut *outcome, SlotState::Free) {
            SlotState::Done(result) => result,
            // `wait_while` returned, so it is not running; the other two have no such end.
            SlotState::Abandoned | SlotState::Free | SlotState::Running => Err(interrupted()),
        }
    }

    /// Returns `true` if [`wait`](Self::wait) would return at once.
    pub fn is_ready(&self) -> bool {
        let slot = self.0.as_ref();
        slot.is_none_or(|slot| !matches!(*slot.outcome.lock(), SlotState::Running))
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
        let mut outcome = slot.outcome.lock();
        let next = match &*outcome {
            SlotState::Running => SlotState::Abandoned,
            SlotState::Abandoned | SlotState::Done(_) | SlotState::Free => SlotState::Free,
        };
        let result = mem::replace(&mut *outcome, next);
        drop(outcome);
        // Dropping a buffer takes a while, so the lock is released first.
        drop(result);
    }
}

/// The end of a started operation that delivers its result. If it is dropped without a result, it reports an error, so
/// that nobody waits forever.
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
        let mut outcome = slot.outcome.lock();
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
        // The slot may serve another operation already; the thread that waits for that one then checks once more.
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
pub(crate) struct SlotPool {
    slots: Mutex<Vec<Arc<PendingSlot>>>,
    waited: Arc<WaitClock>,
}

impl SlotPool {
    /// A pool whose operations tell `waited` how long callers have waited for them.
    pub(crate) fn new(waited: &Arc<WaitClock>) -> Self {
        Self {
            slots: Mutex::default(),
            waited: Arc::clone(waited),
        }
    }

    pub(crate) fn pair(&self) -> (Pending, Completion) {
        let mut slots = self.slots.lock();
        let free = slots.iter().find(|slot| slot.occupy());
        let slot = match free {
            Some(slot) => Arc::clone(slot),
            None => {
                let slot = Arc::new(PendingSlot {
                    outcome: Mutex::new(SlotState::Running),
                    done: Condvar::new(),
                    waited: Arc::clone(&self.waited),
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
    waited: Arc<WaitClock>,
}

impl PendingSlot {
    /// Takes the slot if it is free, and returns whether it was.
    fn occupy(&self) -> bool {
        let mut outcome = self.outcome.lock();
        let free = matches!(*outcome, SlotState::Free);
        if free {
            *outcome = SlotState::Running;
        }
        free
    }
}

#[derive(Debug)]
enum SlotState {
    /// Nobody wants the result.
    Abandoned,
    Done(Result<Buffer>),
    Free,
    Running,
}

fn interrupted() -> Error {
    Error::closed(
        "the operation was given up before it ran; the group's communication thread is gone",
    )
}

const MAX_FREE_SLOTS: usize = 256;

/// The two ends of a queue. Once one end is gone, the queue is closed: nothing more can be sent. Jobs that were sent
/// before are still received, or dropped with the receiving end.
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
        let mut state = self.0.state.lock();
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
        self.0.state.lock().closed = true;
        self.0.arrival.notify_one();
    }
}

/// The receiving end of the queue.
#[derive(Debug)]
pub(super) struct Receiver<T>(Arc<JobQueue<T>>);

impl<T> Receiver<T> {
    /// Waits for the next job; returns `None` if there will be no more.
    pub(super) fn recv(&self) -> Option<T> {
        let empty = |state: &mut JobQueueState<T>| state.jobs.is_empty() && !state.closed;
        let mut waited = self.0.arrival.wait_while(self.0.state.lock(), empty);
        waited.jobs.pop_front()
    }

    /// Returns the next job, if it is there.
    pub(super) fn try_recv(&self) -> Option<T> {
        self.0.state.lock().jobs.pop_front()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        // Values in the jobs may send again when they are dropped, so the lock is released first.
        drop(jobs);
    }
}

#[derive(Debug)]
struct JobQueue<T> {
    state: Mutex<JobQueueState<T>>,
    arrival: Condvar,
}

#[derive(Debug)]
struct JobQueueState<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

/// A lock with a queue: each caller gets a number, and numbers are served in order.
///
/// The numbers are the sequence numbers of the operations, so the lock makes all ranks count alike, whichever of their
/// threads runs an operation.
#[derive(Debug, Default)]
pub(crate) struct TicketLock {
    state: Mutex<TicketState>,
    changed: Condvar,
}

impl TicketLock {
    pub(crate) fn take_ticket(self: &Arc<Self>) -> Ticket {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        drop(state);
        Ticket {
            number,
            lock: Some(Arc::clone(self)),
        }
    }

    /// Waits until everyone before this ticket has been served.
    pub(crate) fn acquire(&self, ticket: Ticket) -> OpPermit<'_> {
        let number = ticket.used();
        let mut waited = Duration::ZERO;
        let mut state = self.state.lock();
        if state.serving != number {
            let began = Instant::now();
            state.waiting += 1;
            let early = |state: &mut TicketState| state.serving != number;
            state = self.changed.wait_while(state, early);
            state.waiting -= 1;
            waited = began.elapsed();
        }
        drop(state);
        OpPermit {
            lock: self,
            number,
            waited,
        }
    }

    /// Serves a ticket while the caller still holds the permit of the one before it. The caller must end the turns in
    /// their order.
    pub(crate) fn acquire_next(&self, ticket: Ticket) -> OpPermit<'_> {
        OpPermit {
            lock: self,
            number: ticket.used(),
            waited: Duration::ZERO,
        }
    }

    /// Waits up to `pause` until nobody is in the lock, and returns whether that is so.
    pub(crate) fn is_idle_within(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        state.waiting += 1;
        let busy = |state: &mut TicketState| state.serving != state.next;
        let mut state = self.changed.wait_timeout_while(state, pause, busy);
        state.waiting -= 1;
        state.serving == state.next
    }

    pub(crate) fn serving(&self) -> u64 {
        self.state.lock().serving
    }

    /// Moves on to a number, or past it if it and those after it were given up.
    fn release(&self, mut state: MutexGuard<'_, TicketState>, mut number: u64) {
        while let Some(index) = state.abandoned.iter().position(|x| *x == number) {
            state.abandoned.swap_remove(index);
            number += 1;
        }
        state.serving = number;
        let awaited = state.waiting > 0;
        drop(state);
        // A system call takes longer than a small operation, so there is none if nobody waits.
        if awaited {
            self.changed.notify_all();
        }
    }
}

/// A place in the lock, to be turned into an [`OpPermit`]. If it is dropped instead, for example because its thread
/// panics, the lock skips it when its turn comes, and never stops.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    /// `None` once the ticket is used.
    lock: Option<Arc<TicketLock>>,
}

/// The right to run one operation; the next one follows when it is dropped.
#[derive(Debug)]
pub(crate) struct OpPermit<'a> {
    lock: &'a TicketLock,
    number: u64,
    waited: Duration,
}

impl Ticket {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn used(mut self) -> u64 {
        self.lock = None;
        self.number
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take() else {
            return;
        };
        let mut state = lock.state.lock();
        if state.serving == self.number {
            lock.release(state, self.number + 1);
        } else {
            state.abandoned.push(self.number);
        }
    }
}

impl OpPermit<'_> {
    /// The time for which the caller has waited for its turn.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpPermit<'_> {
    fn drop(&mut self) {
        self.lock.release(self.lock.state.lock(), self.number + 1);
    }
}

#[derive(Debug, Default)]
struct TicketState {
    next: u64,
    serving: u64,
    /// Tickets that were dropped before their acquire.
    abandoned: Vec<u64>,
    /// The number of threads that wait for a change.
    waiting: usize,
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

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
        let used = || slots.slots.lock().len();
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

    #[test]
    fn tickets_are_served_in_order() {
        let lock = Arc::new(TicketLock::default());
        let served = Mutex::new(Vec::new());
        let tickets: Vec<Ticket> = (0..8).map(|_| lock.take_ticket()).collect();
        assert!(!lock.is_idle_within(Duration::ZERO));
        thread::scope(|scope| {
            for ticket in tickets.into_iter().rev() {
                let (lock, served) = (&lock, &served);
                scope.spawn(move || {
                    let permit = lock.acquire(ticket);
                    served.lock().unwrap().push(permit.number());
                });
            }
        });
        assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(lock.is_idle_within(Duration::ZERO));
        assert_eq!(lock.serving(), 8);
    }

    #[test]
    fn tickets_that_are_dropped_hold_nobody_up() {
        let lock = Arc::new(TicketLock::default());
        let [first, second, third, fourth, fifth] = std::array::from_fn(|_| lock.take_ticket());
        drop(third);
        drop(second);
        assert_eq!(lock.serving(), 0, "the first one has not been served");
        let permit = lock.acquire(first);
        drop(fourth);
        drop(permit);
        assert_eq!(lock.acquire(fifth).number(), 4);
        drop(lock.take_ticket());
        assert!(lock.is_idle_within(Duration::ZERO));
        assert_eq!(lock.serving(), 6);
    }
}
