//! The order in which the operations of one rank run.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A waiting line: whoever joins gets a number, and numbers are served in order.
///
/// The numbers are the sequence numbers of the operations, so the line is what makes all ranks
/// count alike, whichever of their threads an operation runs on.
#[derive(Debug, Default)]
pub(crate) struct Line {
    state: Mutex<State>,
    moved: Condvar,
}

impl Line {
    pub(crate) fn join(self: &Arc<Self>) -> Ticket {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        drop(state);
        Ticket {
            number,
            line: Some(Arc::clone(self)),
        }
    }

    /// Waits until everyone before this ticket has been served.
    pub(crate) fn turn(&self, ticket: Ticket) -> Turn<'_> {
        let number = ticket.used();
        let mut state = self.lock();
        if state.serving != number {
            state.waiting += 1;
            let waited = self
                .moved
                .wait_while(state, |state| state.serving != number);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        drop(state);
        Turn { line: self, number }
    }

    /// Serves a ticket beside the one before it, whose turn the caller holds. The caller ends
    /// the turns in their order.
    pub(crate) fn follow(&self, ticket: Ticket) -> Turn<'_> {
        Turn {
            line: self,
            number: ticket.used(),
        }
    }

    /// Waits a while until nobody is in the line, and says whether that is so.
    pub(crate) fn is_idle_within(&self, pause: Duration) -> bool {
        let mut state = self.lock();
        state.waiting += 1;
        let waited = self
            .moved
            .wait_timeout_while(state, pause, |state| state.serving != state.next);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.serving == state.next
    }

    /// The number that is served now, or next.
    pub(crate) fn serving(&self) -> u64 {
        self.lock().serving
    }

    /// Goes on to a number, and past those that were given up.
    fn go_on(&self, mut state: MutexGuard<'_, State>, mut number: u64) {
        while let Some(index) = state.given_up.iter().position(|x| *x == number) {
            state.given_up.swap_remove(index);
            number += 1;
        }
        state.serving = number;
        let awaited = state.waiting > 0;
        drop(state);
        // The system is asked only where somebody waits: it takes longer than a small operation.
        if awaited {
            self.moved.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counters and a list of numbers are whole at every moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the line, to be turned into a [`Turn`]. One that is dropped instead, as by the panic
/// of a thread that holds it, is passed over when it would be served: the line never stops.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    /// Until it is used.
    line: Option<Arc<Line>>,
}

/// The right to run one operation; the next one follows when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    line: &'a Line,
    number: u64,
}

impl Ticket {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn used(mut self) -> u64 {
        self.line = None;
        self.number
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(line) = self.line.take() else {
            return;
        };
        let mut state = line.lock();
        if state.serving == self.number {
            line.go_on(state, self.number + 1);
        } else {
            state.given_up.push(self.number);
        }
    }
}

impl Turn<'_> {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.line.go_on(self.line.lock(), self.number + 1);
    }
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    serving: u64,
    /// Tickets that were dropped before their turn.
    given_up: Vec<u64>,
    /// How many threads wait for a change.
    waiting: usize,
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, thread};

    use super::*;

    #[test]
    fn tickets_are_served_in_order() {
        let line = Arc::new(Line::default());
        let served = Mutex::new(Vec::new());
        let tickets: Vec<Ticket> = (0..8).map(|_| line.join()).collect();
        assert!(!line.is_idle_within(Duration::ZERO));
        thread::scope(|scope| {
            for ticket in tickets.into_iter().rev() {
                let (line, served) = (&line, &served);
                scope.spawn(move || {
                    let turn = line.turn(ticket);
                    served.lock().unwrap().push(turn.number());
                });
            }
        });
        assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(line.is_idle_within(Duration::ZERO));
        assert_eq!(line.serving(), 8);
    }

    #[test]
    fn tickets_that_are_dropped_hold_nobody_up() {
        let line = Arc::new(Line::default());
        let [first, second, third, fourth, fifth] = std::array::from_fn(|_| line.join());
        drop(third);
        drop(second);
        assert_eq!(line.serving(), 0, "the first one has not had its turn");
        let turn = line.turn(first);
        drop(fourth);
        drop(turn);
        assert_eq!(line.turn(fifth).number(), 4);
        drop(line.join());
        assert!(line.is_idle_within(Duration::ZERO));
        assert_eq!(line.serving(), 6);
    }
}
