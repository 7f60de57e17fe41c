//! The order in which the operations of one rank run.

use std::{sync::Arc, time::Duration};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};

/// A waiting lock: whoever joins gets a number, and numbers are served in order.
///
/// The numbers are the sequence numbers of the operations, so the lock is what makes all ranks
/// count alike, whichever of their threads an operation runs on.
#[derive(Debug, Default)]
pub(crate) struct TicketLock {
    state: Mutex<TicketState>,
    changed: Condvar,
}

impl TicketLock {
    pub(crate) fn take_ticket(self: &Arc<Self>) -> Ticket {
        let mut state = self.lock();
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
        let mut state = self.lock();
        if state.serving != number {
            state.waiting += 1;
            let waited = self
                .changed
                .wait_while(state, |state| state.serving != number);
            state = waited;
            state.waiting -= 1;
        }
        drop(state);
        OpPermit { lock: self, number }
    }

    /// Serves a ticket beside the one before it, whose permit the caller holds. The caller ends
    /// the turns in their order.
    pub(crate) fn acquire_next(&self, ticket: Ticket) -> OpPermit<'_> {
        OpPermit {
            lock: self,
            number: ticket.used(),
        }
    }

    /// Waits a while until nobody is in the lock, and says whether that is so.
    pub(crate) fn is_idle_within(&self, pause: Duration) -> bool {
        let mut state = self.lock();
        state.waiting += 1;
        let waited = self
            .changed
            .wait_timeout_while(state, pause, |state| state.serving != state.next);
        let mut state = waited;
        state.waiting -= 1;
        state.serving == state.next
    }

    /// The number that is served now, or next.
    pub(crate) fn serving(&self) -> u64 {
        self.lock().serving
    }

    /// Goes on to a number, and past those that were given up.
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

    fn lock(&self) -> MutexGuard<'_, TicketState> {
        self.state.lock()
    }
}

/// A place in the lock, to be turned into a [`OpPermit`]. One that is dropped instead, as by the panic
/// of a thread that holds it, is passed over when it would be served: the lock never stops.
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
        let mut state = lock.lock();
        if state.serving == self.number {
            lock.release(state, self.number + 1);
        } else {
            state.abandoned.push(self.number);
        }
    }
}

impl OpPermit<'_> {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpPermit<'_> {
    fn drop(&mut self) {
        self.lock.release(self.lock.lock(), self.number + 1);
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
    use std::{sync::Mutex, thread};

    use super::*;

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
