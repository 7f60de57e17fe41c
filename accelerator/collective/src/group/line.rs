//! The order in which the operations of one rank run.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
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
    pub(crate) fn join(&self) -> Ticket {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        Ticket(number)
    }

    /// Waits until everyone before this ticket has been served.
    pub(crate) fn turn(&self, ticket: Ticket) -> Turn<'_> {
        let state = self.lock();
        let waited = self
            .moved
            .wait_while(state, |state| state.serving != ticket.0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        Turn {
            line: self,
            number: ticket.0,
        }
    }

    /// Waits a while until nobody is in the line, and says whether that is so.
    pub(crate) fn is_idle_within(&self, pause: Duration) -> bool {
        let state = self.lock();
        let waited = self
            .moved
            .wait_timeout_while(state, pause, |state| state.serving != state.next);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.serving == state.next
    }

    /// The number that is served now, or next.
    pub(crate) fn serving(&self) -> u64 {
        self.lock().serving
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Two counters are whole at every moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the line. Every ticket must be turned into a [`Turn`], or the line stops.
#[derive(Debug)]
pub(crate) struct Ticket(u64);

/// The right to run one operation; the next one follows when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    line: &'a Line,
    number: u64,
}

impl Turn<'_> {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.line.lock().serving = self.number + 1;
        self.line.moved.notify_all();
    }
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    serving: u64,
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, thread};

    use super::*;

    #[test]
    fn tickets_are_served_in_order() {
        let line = Line::default();
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
}
