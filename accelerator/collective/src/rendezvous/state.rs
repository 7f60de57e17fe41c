//! The store as a pure state machine.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Kind, list_ranks},
    transport::Seconds,
    wire::message::Registration,
};

/// Who has come to a rendezvous, and what follows from it.
///
/// ```text
/// gathering ── the last rank comes ──────────────► complete
///     └─────── deadline, or a contradiction ─────► failed
/// ```
///
/// Whoever comes after the end is refused; what happened before does not change.
#[derive(Debug)]
pub(crate) struct State {
    world_size: usize,
    ranks: BTreeMap<usize, Arrival>,
    /// When the least patient of those present gives up.
    deadline: Option<Instant>,
    /// When the first rank came.
    started: Option<Instant>,
    /// What else happened, told when the rendezvous fails.
    notes: Vec<String>,
    phase: Phase,
}

impl State {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            world_size,
            ranks: BTreeMap::new(),
            deadline: None,
            started: None,
            notes: Vec::new(),
            phase: Phase::Gathering,
        }
    }

    /// What to do about an event.
    pub(crate) fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Gone { connection } => self.gone(connection),
            Event::Registered {
                connection,
                registration,
            } => return self.registered(connection, registration, now),
            Event::Stranger { note } => self.note(note),
            Event::Tick => {}
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            let error = self.overdue(now);
            return self.fail(error);
        }
        Vec::new()
    }

    /// When the next [`Event::Tick`] is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn registered(
        &mut self,
        connection: Connection,
        registration: Registration,
        now: Instant,
    ) -> Vec<Action> {
        let refuse = |error| vec![Action::Refuse { connection, error }];
        match &self.phase {
            Phase::Complete => {
                return refuse(Error::about(
                    Kind::Rendezvous,
                    vec![registration.rank],
                    format!(
                        "rank {} comes too late: all {} ranks of this job have met already; is an \
                         old process still running, or another job using this port?",
                        registration.rank, self.world_size
                    ),
                ));
            }
            Phase::Failed(error) => return refuse(error.clone()),
            Phase::Gathering => {}
        }
        if let Err(error) = self.check(&registration) {
            let mut actions = refuse(error.clone());
            actions.extend(self.fail(error));
            return actions;
        }
        self.started.get_or_insert(now);
        let deadline = now + registration.patience.min(LONGEST);
        self.deadline = Some(self.deadline.map_or(deadline, |other| other.min(deadline)));
        let arrival = Arrival {
            connection,
            registration,
        };
        self.ranks.insert(arrival.registration.rank, arrival);
        if self.ranks.len() < self.world_size {
            return Vec::new();
        }
        self.phase = Phase::Complete;
        self.deadline = None;
        vec![Action::Welcome {
            connections: self.ranks.values().map(|x| x.connection).collect(),
            ranks: self
                .ranks
                .values()
                .map(|x| x.registration.clone())
                .collect(),
        }]
    }

    /// A registration that contradicts what is known can never become right: the rendezvous
    /// fails for everyone at once, with the contradiction as the reason.
    fn check(&self, new: &Registration) -> Result<(), Error> {
        if new.world_size != self.world_size {
            return Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "rank {} (process {} on {}) came with a world size of {}, but this job has \
                     {}; WORLD_SIZE must be the same for every process",
                    new.rank, new.pid, new.host, new.world_size, self.world_size
                ),
            ));
        }
        if new.rank >= self.world_size {
            return Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "process {} on {} came as rank {}, but the ranks of this job are 0 to {}",
                    new.pid,
                    new.host,
                    new.rank,
                    self.world_size - 1
                ),
            ));
        }
        match self.ranks.get(&new.rank) {
            None => Ok(()),
            Some(Arrival { registration, .. }) => Err(Error::about(
                Kind::Rendezvous,
                vec![new.rank],
                format!(
                    "two processes came as rank {}: process {} on {} and process {} on {}; RANK \
                     must differ from process to process",
                    new.rank, registration.pid, registration.host, new.pid, new.host
                ),
            )),
        }
    }

    fn gone(&mut self, connection: Connection) {
        if !matches!(self.phase, Phase::Gathering) {
            return;
        }
        let rank = self.ranks.iter().find(|(_, x)| x.connection == connection);
        if let Some((&rank, arrival)) = rank {
            let Registration { pid, host, .. } = &arrival.registration;
            self.note(format!(
                "rank {rank} (process {pid} on {host}) came and went away again"
            ));
            self.ranks.remove(&rank);
        }
    }

    fn note(&mut self, note: String) {
        if matches!(self.phase, Phase::Gathering) && self.notes.len() < NOTES {
            self.notes.push(note);
        }
    }

    fn overdue(&self, now: Instant) -> Error {
        let missing: Vec<usize> = (0..self.world_size)
            .filter(|rank| !self.ranks.contains_key(rank))
            .collect();
        let waited = self.started.map_or(Duration::ZERO, |started| now - started);
        let mut message = format!(
            "rendezvous: {} of {} ranks came within {}; missing: {}; start as many processes as \
             WORLD_SIZE says, and see what became of those that did not come",
            self.ranks.len(),
            self.world_size,
            Seconds(waited),
            list_ranks(&missing),
        );
        for note in &self.notes {
            message.push_str("; ");
            message.push_str(note);
        }
        Error::about(Kind::Rendezvous, missing, message)
    }

    fn fail(&mut self, error: Error) -> Vec<Action> {
        self.deadline = None;
        self.phase = Phase::Failed(error.clone());
        std::mem::take(&mut self.ranks)
            .into_values()
            .map(|arrival| Action::Refuse {
                connection: arrival.connection,
                error: error.clone(),
            })
            .collect()
    }
}

/// What happens at the store.
#[derive(Debug)]
pub(crate) enum Event {
    /// A connection ended.
    Gone { connection: Connection },
    /// A rank that may join said who it is.
    Registered {
        connection: Connection,
        registration: Registration,
    },
    /// Somebody was turned away at the door.
    Stranger { note: String },
    /// Time has passed.
    Tick,
}

/// What the store does.
#[derive(Debug)]
pub(crate) enum Action {
    Refuse {
        connection: Connection,
        error: Error,
    },
    /// Gives all ranks the table of all.
    Welcome {
        connections: Vec<Connection>,
        ranks: Vec<Registration>,
    },
}

/// The number of a connection to the store.
pub(crate) type Connection = u64;

#[derive(Debug)]
enum Phase {
    Complete,
    Failed(Error),
    Gathering,
}

#[derive(Debug)]
struct Arrival {
    connection: Connection,
    registration: Registration,
}

/// No rank is more patient than this, so that adding it to a point in time cannot overflow.
/// The longest wait that is computed with; beyond it a deadline would leave the range of time.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// How many notes are kept.
const NOTES: usize = 8;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn registration(rank: usize, world_size: usize) -> Registration {
        Registration {
            rank,
            world_size,
            host: "here".to_owned(),
            pid: 100 + rank as u32,
            address: "127.0.0.1:1".parse().unwrap(),
            patience: Duration::from_secs(5),
        }
    }

    fn come(connection: Connection, rank: usize, world_size: usize) -> Event {
        Event::Registered {
            connection,
            registration: registration(rank, world_size),
        }
    }

    fn refusals(actions: &[Action]) -> Vec<(Connection, String)> {
        actions
            .iter()
            .map(|action| match action {
                Action::Refuse { connection, error } => (*connection, error.to_string()),
                Action::Welcome { .. } => panic!("unexpected {action:?}"),
            })
            .collect()
    }

    #[test]
    fn the_last_rank_completes_the_table() {
        let now = Instant::now();
        let mut state = State::new(3);
        assert!(state.step(come(10, 2, 3), now).is_empty());
        assert!(state.step(come(11, 0, 3), now).is_empty());
        let actions = state.step(come(12, 1, 3), now);
        let [Action::Welcome { connections, ranks }] = &actions[..] else {
            panic!("unexpected {actions:?}");
        };
        assert_eq!(connections, &[11, 12, 10]);
        assert!(ranks.iter().enumerate().all(|(i, x)| x.rank == i));
        assert_eq!(state.deadline(), None);
        // Nothing changes afterwards.
        let late = state.step(come(13, 1, 3), now);
        assert!(refusals(&late)[0].1.contains("too late"));
        assert!(state.step(Event::Gone { connection: 10 }, now).is_empty());
    }

    #[test]
    fn the_deadline_names_the_missing_and_what_was_seen() {
        let now = Instant::now();
        let mut state = State::new(3);
        state.step(come(1, 0, 3), now);
        state.step(come(2, 2, 3), now);
        state.step(Event::Gone { connection: 2 }, now);
        let note = "127.0.0.1:9 was refused: a wrong token".to_owned();
        state.step(Event::Stranger { note }, now);
        let due = state.deadline().unwrap();
        assert_eq!(due, now + Duration::from_secs(5));
        assert!(
            state
                .step(Event::Tick, due - Duration::from_millis(1))
                .is_empty()
        );
        let told = refusals(&state.step(Event::Tick, due));
        assert_eq!(told.len(), 1);
        assert!(told[0].1.starts_with(
            "rendezvous: 1 of 3 ranks came within 5 s; missing: ranks 1 and 2; start"
        ));
        assert!(
            told[0]
                .1
                .contains("rank 2 (process 102 on here) came and went away again")
        );
        assert!(told[0].1.contains("a wrong token"));
        let late = state.step(come(4, 1, 3), due);
        assert_eq!(refusals(&late)[0].1, told[0].1);
    }

    #[test]
    fn contradictions_are_told_to_everyone() {
        let cases = [
            (
                come(2, 0, 3),
                "two processes came as rank 0: process 100 on here",
            ),
            (
                come(2, 1, 2),
                "came with a world size of 2, but this job has 3",
            ),
            (
                come(2, 3, 3),
                "came as rank 3, but the ranks of this job are 0 to 2",
            ),
        ];
        for (event, text) in cases {
            let now = Instant::now();
            let mut state = State::new(3);
            state.step(come(1, 0, 3), now);
            let told = refusals(&state.step(event, now));
            let connections: Vec<Connection> = told.iter().map(|(x, _)| *x).collect();
            assert_eq!(connections, [2, 1]);
            assert!(
                told.iter().all(|(_, reason)| reason.contains(text)),
                "{told:?}"
            );
        }
    }

    #[derive(Clone, Debug)]
    enum Move {
        Come(usize),
        Go(usize),
        Wait(u64),
    }

    fn any_move() -> impl Strategy<Value = Move> {
        prop_oneof![
            4 => (0_usize..5).prop_map(Move::Come),
            1 => (0_usize..20).prop_map(Move::Go),
            1 => (0_u64..2000).prop_map(Move::Wait),
        ]
    }

    proptest! {
        /// Every connection gets at most one answer, and never different ones; a welcome goes to
        /// all ranks, each once; a failure to all that are present.
        #[test]
        fn everyone_gets_one_answer(moves in proptest::collection::vec(any_move(), 0..40)) {
            let mut now = Instant::now();
            let mut state = State::new(4);
            let mut present: HashSet<Connection> = HashSet::new();
            let mut welcomed = false;
            for (connection, next) in moves.into_iter().enumerate() {
                let connection = connection as Connection;
                let event = match next {
                    Move::Come(rank) => {
                        present.insert(connection);
                        come(connection, rank, 4)
                    }
                    Move::Go(at) => {
                        let Some(&connection) = present.iter().nth(at) else { continue };
                        present.remove(&connection);
                        Event::Gone { connection }
                    }
                    Move::Wait(pause) => {
                        now += Duration::from_millis(pause);
                        Event::Tick
                    }
                };
                let actions = state.step(event, now);
                let failed = actions.len() > 1;
                for action in actions {
                    match action {
                        Action::Refuse { connection, .. } => {
                            prop_assert!(present.remove(&connection));
                        }
                        Action::Welcome { connections, ranks } => {
                            prop_assert!(!welcomed);
                            welcomed = true;
                            prop_assert_eq!(ranks.len(), 4);
                            prop_assert!(ranks.iter().enumerate().all(|(i, x)| x.rank == i));
                            for connection in connections {
                                prop_assert!(present.remove(&connection));
                            }
                        }
                    }
                }
                if failed {
                    prop_assert!(present.is_empty());
                    prop_assert!(!welcomed);
                }
                if let Some(deadline) = state.deadline() {
                    prop_assert!(!present.is_empty() || !welcomed);
                    prop_assert!(deadline > now);
                }
            }
        }
    }
}
