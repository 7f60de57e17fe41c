//! The communication thread: started operations, several at a time.

use std::collections::VecDeque;

use super::{
    engine::{Exchange, Output, Progress, Reduction, Scratch},
    jobs::Receiver,
    line::{Ticket, Turn},
    member::{Member, Watchdog},
    observer::{Observation, Runner},
    pending::Completion,
};
use crate::{
    buffer::Buffer,
    error::{Error, Result},
    fingerprint::CollectiveFingerprint,
    reduce::ReduceOp,
    transport::{Position, Watch},
};

/// A started operation on its way to the communication thread.
pub(super) struct Job {
    pub(super) ticket: Ticket,
    pub(super) fingerprint: CollectiveFingerprint,
    pub(super) buffer: Buffer,
    pub(super) op: ReduceOp,
    pub(super) output: Output,
    pub(super) completion: Completion,
}

impl Job {
    /// Runs it to its end on this thread.
    pub(super) fn run(self, member: &Member) {
        let (op, output, mut buffer) = (self.op, self.output, self.buffer);
        member.perform(
            Runner::Communication,
            self.ticket,
            &self.fingerprint,
            |exchange| {
                exchange.reduce_buffer(op, &output, &mut buffer)?;
                Ok(buffer)
            },
            |outcome| self.completion.complete(outcome),
        );
    }
}

/// Runs jobs until there will be no more.
pub(super) fn serve(member: &Member, jobs: &Receiver<Job>) {
    let lanes = member.transport.lanes();
    if lanes < 2 {
        while let Some(job) = jobs.recv() {
            job.run(member);
        }
        return;
    }
    let mut flights = Flights {
        member,
        flights: VecDeque::with_capacity(lanes),
        next: None,
        spare: Vec::with_capacity(lanes),
    };
    // Dropped first: the group has failed before those that wait have their turns.
    let _watchdog = Watchdog { member };
    let inbox = member.transport.inbox();
    loop {
        // Before jobs are looked for: one that comes after that is news.
        let version = inbox.version();
        if !flights.admit(jobs, lanes) {
            return;
        }
        flights.advance(version);
    }
}

/// The operations under way, in their order.
///
/// Each goes on whenever its parts have come. They end in their order, and an error waits for its
/// turn: what a rank sees is what it would see if they ran one after the other.
struct Flights<'a> {
    member: &'a Member,
    flights: VecDeque<Flight<'a>>,
    /// A job that has to wait: an operation between it and the last one runs on another thread.
    next: Option<Job>,
    spare: Vec<Scratch>,
}

struct Flight<'a> {
    turn: Turn<'a>,
    fingerprint: CollectiveFingerprint,
    observation: Option<Observation<'a>>,
    watch: Watch,
    scratch: Scratch,
    reduction: Reduction,
    buffer: Buffer,
    completion: Completion,
    state: State,
}

enum State {
    Running(Progress),
    Failed(Error),
}

impl<'a> Flights<'a> {
    /// Lets jobs in, as many as there is room for; waits for one where nothing is under way. Says
    /// whether there is anything to do.
    fn admit(&mut self, jobs: &Receiver<Job>, lanes: usize) -> bool {
        while self.flights.len() < lanes {
            let job = match self.next.take() {
                Some(job) => job,
                None if self.flights.is_empty() => match jobs.recv() {
                    Some(job) => job,
                    None => return false,
                },
                None => match jobs.try_recv() {
                    Some(job) => job,
                    None => break,
                },
            };
            let order = &self.member.order;
            let turn = match self.flights.back() {
                None => order.turn(job.ticket),
                Some(last) if last.turn.number() + 1 == job.ticket.number() => {
                    order.follow(job.ticket)
                }
                Some(_) => {
                    self.next = Some(job);
                    break;
                }
            };
            let (op, output) = (job.op, &job.output);
            self.start(
                turn,
                job.fingerprint,
                job.buffer,
                op,
                output,
                job.completion,
            );
        }
        true
    }

    fn start(
        &mut self,
        turn: Turn<'a>,
        fingerprint: CollectiveFingerprint,
        buffer: Buffer,
        op: ReduceOp,
        output: &Output,
        completion: Completion,
    ) {
        let (rank, world_size) = (
            self.member.topology.rank(),
            self.member.topology.world_size(),
        );
        let mut scratch = self.spare.pop().unwrap_or_default();
        scratch.clear(world_size);
        let patience = self.member.options.patience();
        let len = buffer.bytes().len();
        let reduction = Reduction::new(buffer.dtype(), op, output, len, world_size);
        let state = match self.member.state() {
            Ok(()) => State::Running(Progress::Waiting(0..world_size)),
            Err(error) => State::Failed(error),
        };
        self.flights.push_back(Flight {
            watch: Watch::new(rank, turn.number(), fingerprint, patience),
            fingerprint,
            observation: self.member.observation(Runner::Communication),
            turn,
            scratch,
            reduction,
            buffer,
            completion,
            state,
        });
    }

    /// Goes on with everything, ends what is done, and waits for news since `version` where there
    /// is nothing else to do.
    fn advance(&mut self, version: u64) {
        let inbox = self.member.transport.inbox();
        let mut position = Position::First;
        for flight in &mut self.flights {
            flight.advance(self.member, position);
            if matches!(flight.state, State::Failed(_)) {
                // What comes after an error is not begun.
                break;
            }
            position = Position::Later;
        }
        if self.land() {
            return;
        }
        if let Some(first) = self.flights.front_mut()
            && let State::Running(Progress::Waiting(awaited)) = &first.state
            && let Err(error) = inbox.wait_for_news(
                version,
                awaited.clone(),
                &*self.member.transport,
                &mut first.watch,
            )
        {
            let error = first
                .exchange(self.member, Position::First)
                .disagreement(error);
            first.state = State::Failed(error);
        }
    }

    /// Ends the operations that are done, in their order, and says whether there were any.
    fn land(&mut self) -> bool {
        let mut any = false;
        while let Some(first) = self.flights.front_mut() {
            let outcome = match &first.state {
                State::Running(Progress::Waiting(_)) => {
                    if any {
                        // Its patience begins when those before it are done.
                        first.watch.restart();
                    }
                    break;
                }
                // The error of an operation before it is the last word, also for what is done.
                State::Running(Progress::Done) => self.member.state(),
                State::Failed(error) => Err(self.member.fail(first.turn.number(), error.clone())),
            };
            any = true;
            // There is a first one.
            let Some(flight) = self.flights.pop_front() else {
                break;
            };
            self.spare.push(flight.end(outcome));
        }
        any
    }
}

impl Flight<'_> {
    fn exchange<'b>(&'b mut self, member: &'b Member, position: Position) -> Exchange<'b> {
        Exchange::resumed(
            &*member.transport,
            &mut self.watch,
            &mut self.scratch,
            position,
        )
    }

    fn advance(&mut self, member: &Member, position: Position) {
        if !matches!(self.state, State::Running(Progress::Waiting(_))) {
            return;
        }
        // What failed has been told to everyone, who then send nothing more.
        if let Err(error) = member.state() {
            self.state = State::Failed(error);
            return;
        }
        let mut exchange = Exchange::resumed(
            &*member.transport,
            &mut self.watch,
            &mut self.scratch,
            position,
        );
        let progress = self
            .reduction
            .advance(&mut exchange, self.buffer.bytes_mut());
        self.state = match progress {
            Ok(progress) => State::Running(progress),
            Err(error) => State::Failed(error),
        };
    }

    /// Tells the outcome; the next operation has its turn afterwards.
    fn end(mut self, outcome: Result<()>) -> Scratch {
        self.scratch.clear(0);
        if let Some(observation) = self.observation {
            observation.end(self.turn.number(), &self.fingerprint);
        }
        let buffer = self.buffer;
        self.completion.complete(outcome.map(|()| buffer));
        drop(self.turn);
        self.scratch
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        thread,
        time::Duration,
    };

    use super::*;
    use crate::{
        element::DType,
        error::Kind,
        fingerprint::{CallSite, OpKind},
        group::{
            GroupOptions, ProcessGroup, jobs,
            pending::{Pending, Slots},
        },
    };

    /// An all-reduce of three numbers.
    fn fingerprint() -> CollectiveFingerprint {
        CollectiveFingerprint::new(OpKind::AllReduce, CallSite::new(file!(), line!()))
            .with_op(ReduceOp::Sum)
            .with_data(DType::F32, 3)
    }

    #[test]
    fn what_is_done_behind_a_failure_fails_with_it() {
        let ranks = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        let member = &*ranks[0].0.member;
        let mut flights = Flights {
            member,
            flights: VecDeque::new(),
            next: None,
            spare: Vec::new(),
        };
        let slots = Slots::default();
        let lost = Error::new(Kind::PeerLost, "rank 1 is lost");
        let states = [
            State::Running(Progress::Done),
            State::Failed(lost),
            State::Running(Progress::Done),
        ];
        let pending = states.map(|state| {
            let (pending, completion) = slots.pair();
            let turn = member.order.follow(member.admit(&fingerprint()).unwrap());
            let buffer = Buffer::zeroed(DType::F32, 3);
            let (op, output) = (ReduceOp::Sum, Output::Full);
            flights.start(turn, fingerprint(), buffer, op, &output, completion);
            flights.flights.back_mut().unwrap().state = state;
            pending
        });
        assert!(flights.land());
        let [before, failed, after] = pending.map(Pending::wait);
        assert_eq!(before.unwrap().len(), 3);
        assert!(failed.unwrap_err().is_peer_lost());
        assert!(after.unwrap_err().is_peer_lost());
    }

    #[test]
    fn nobody_waits_for_a_thread_that_panicked() {
        let ranks = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        let member = Arc::clone(&ranks[0].0.member);
        let fingerprint = fingerprint();
        let (sender, jobs) = jobs::channel();
        let slots = Slots::default();
        let pending: Vec<Pending> = (0..3)
            .map(|_| {
                let (pending, completion) = slots.pair();
                let job = Job {
                    ticket: member.admit(&fingerprint).unwrap(),
                    fingerprint,
                    buffer: Buffer::zeroed(DType::F32, 3),
                    op: ReduceOp::Sum,
                    output: Output::Full,
                    completion,
                };
                assert!(sender.send(job).is_ok());
                pending
            })
            .collect();
        let after = member.admit(&fingerprint).unwrap();
        let thread = thread::spawn({
            let member = Arc::clone(&member);
            move || {
                let _jobs = jobs;
                let _watchdog = Watchdog { member: &member };
                panic!("the communication thread stumbled");
            }
        });
        assert!(thread.join().is_err());
        for pending in pending {
            assert!(pending.wait().unwrap_err().is_closed());
        }
        let (done, ends) = mpsc::channel();
        thread::spawn(move || {
            let outcome = member.perform(
                Runner::Caller,
                after,
                &fingerprint,
                |_| Ok(()),
                |outcome| outcome,
            );
            ranks[0].close().unwrap();
            done.send(outcome.unwrap_err()).unwrap();
        });
        let error = ends.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(error.to_string().contains("stumbled"), "{error}");
    }
}
