//! The communication thread: started operations, several at a time.

use std::collections::VecDeque;
use std::time::Instant;

use super::engine::{BufferOp, OpContext, OpProgress, ResumableOp, Scratch};
use super::flight_recorder::OpOutcome;
use super::observer::{ExecThread, OpTimer};
use super::pending::{Completion, OpPermit, Receiver, Ticket};
use super::rank_state::{AbortOnPanic, RankState};
use crate::{
    buffer::Buffer,
    error::{Error, Result},
    fingerprint::CollectiveFingerprint,
    transport::{OpDeadline, OpPosition},
};

/// A started operation on its way to the communication thread.
pub(super) struct Job {
    pub(super) ticket: Ticket,
    pub(super) fingerprint: CollectiveFingerprint,
    pub(super) buffer: Buffer,
    pub(super) op: BufferOp,
    pub(super) completion: Completion,
}

impl Job {
    /// Runs it to its end on this thread.
    pub(super) fn run(self, rank_state: &RankState) {
        let (op, mut buffer) = (self.op, self.buffer);
        rank_state.perform(
            ExecThread::Communication,
            self.ticket,
            &self.fingerprint,
            |ctx| {
                ctx.run_buffer_op(&op, &mut buffer)?;
                Ok(buffer)
            },
            |outcome| self.completion.complete(outcome),
        );
    }
}

pub(super) fn serve(rank_state: &RankState, jobs: &Receiver<Job>) {
    let max_in_flight = rank_state.transport.max_in_flight();
    if max_in_flight < 2 {
        while let Some(job) = jobs.recv() {
            job.run(rank_state);
        }
        return;
    }
    let mut ops = InFlightOps {
        rank_state,
        ops: VecDeque::with_capacity(max_in_flight),
        next: None,
        spare: Vec::with_capacity(max_in_flight),
    };
    // Dropped first, so that the group has failed before waiting threads get their turns.
    let _abort_on_panic = AbortOnPanic { rank_state };
    let inbox = rank_state.transport.inbox();
    loop {
        // Read before the jobs: a job that comes later counts as an event.
        let version = inbox.version();
        if !ops.admit(jobs, max_in_flight) {
            return;
        }
        ops.advance(version);
    }
}

/// The operations under way, in their order.
///
/// Each continues whenever its parts have come. They end in their order, and an error waits for its permit, so a rank
/// sees what it would see if they ran one after the other.
struct InFlightOps<'a> {
    rank_state: &'a RankState,
    ops: VecDeque<InFlightOp<'a>>,
    /// A job that has to wait, because an operation between it and the last one runs on another thread.
    next: Option<Job>,
    spare: Vec<Scratch>,
}

struct InFlightOp<'a> {
    permit: OpPermit<'a>,
    fingerprint: CollectiveFingerprint,
    timer: OpTimer<'a>,
    deadline: OpDeadline,
    scratch: Scratch,
    running: ResumableOp,
    buffer: Buffer,
    completion: Completion,
    state: OpState,
}

enum OpState {
    Running(OpProgress),
    Failed(Error),
}

impl<'a> InFlightOps<'a> {
    /// Admits as many jobs as there is room for; waits for one if nothing is under way. Returns `true` if there is
    /// anything to do.
    fn admit(&mut self, jobs: &Receiver<Job>, max_in_flight: usize) -> bool {
        while self.ops.len() < max_in_flight {
            let job = match self.next.take() {
                Some(job) => job,
                None if self.ops.is_empty() => match jobs.recv() {
                    Some(job) => job,
                    None => return false,
                },
                None => match jobs.try_recv() {
                    Some(job) => job,
                    None => break,
                },
            };
            if let Some(last) = self.ops.back()
                && last.permit.number() + 1 != job.ticket.number()
            {
                self.next = Some(job);
                break;
            }
            self.start(job);
        }
        true
    }

    /// Begins a job, whose ticket follows those of the operations under way.
    fn start(&mut self, job: Job) {
        let rank_state = self.rank_state;
        let permit = match self.ops.is_empty() {
            true => rank_state.order.acquire(job.ticket),
            false => rank_state.order.acquire_next(job.ticket),
        };
        let world_size = rank_state.topology.world_size();
        let mut scratch = self.spare.pop().unwrap_or_default();
        scratch.clear(world_size);
        let timeouts = rank_state.options.op_timeouts();
        let (dtype, len) = (job.buffer.dtype(), job.buffer.bytes().len());
        let state = match rank_state.check_open() {
            Ok(()) => OpState::Running(OpProgress::Waiting(0..world_size)),
            Err(error) => OpState::Failed(error),
        };
        let (number, now) = (permit.number(), Instant::now());
        self.ops.push_back(InFlightOp {
            deadline: rank_state.deadline(number, &job.fingerprint, timeouts, now),
            timer: rank_state.start_timer(ExecThread::Communication, number, &job.fingerprint, now),
            fingerprint: job.fingerprint,
            permit,
            scratch,
            running: job.op.begin(dtype, len, world_size),
            buffer: job.buffer,
            completion: job.completion,
            state,
        });
    }

    /// Continues all operations, ends those that are done, and waits for an event after `version` if
    /// there is nothing else to do.
    fn advance(&mut self, version: u64) {
        let inbox = self.rank_state.transport.inbox();
        let mut position = OpPosition::First;
        for op in &mut self.ops {
            op.advance(self.rank_state, position);
            if matches!(op.state, OpState::Failed(_)) {
                // Operations after a failed one do not continue.
                break;
            }
            position = OpPosition::Later;
        }
        if self.complete_ready() {
            return;
        }
        if let Some(first) = self.ops.front_mut()
            && let OpState::Running(OpProgress::Waiting(awaited)) = &first.state
            && let Err(error) = inbox.wait_for_event(
                version,
                awaited.clone(),
                &self.rank_state.transport,
                &mut first.deadline,
            )
        {
            let error = first
                .context(self.rank_state, OpPosition::First)
                .disagreement(error);
            first.state = OpState::Failed(error);
        }
    }

    /// Ends the operations that are done, in their order, and returns whether there were any.
    fn complete_ready(&mut self) -> bool {
        let mut any = false;
        while let Some(first) = self.ops.front_mut() {
            let outcome = match &first.state {
                OpState::Running(OpProgress::Waiting(_)) => {
                    if any {
                        // Its deadline starts when the operations before it are done.
                        first.deadline.restart();
                    }
                    break;
                }
                // If an earlier operation failed, its error counts, even though this operation is done.
                OpState::Running(OpProgress::Done) => self.rank_state.check_open(),
                OpState::Failed(error) => {
                    Err(self.rank_state.fail(first.permit.number(), error.clone()))
                }
            };
            any = true;
            // There is a first one.
            let Some(op) = self.ops.pop_front() else {
                break;
            };
            self.spare.push(op.end(outcome));
        }
        any
    }
}

impl InFlightOp<'_> {
    fn context<'b>(&'b mut self, rank_state: &'b RankState, position: OpPosition) -> OpContext<'b> {
        OpContext::resumed(
            &rank_state.transport,
            &mut self.deadline,
            &mut self.scratch,
            position,
        )
    }

    fn advance(&mut self, rank_state: &RankState, position: OpPosition) {
        if !matches!(self.state, OpState::Running(OpProgress::Waiting(_))) {
            return;
        }
        // If the group has failed, all ranks know, and send nothing more.
        if let Err(error) = rank_state.check_open() {
            self.state = OpState::Failed(error);
            return;
        }
        let mut ctx = OpContext::resumed(
            &rank_state.transport,
            &mut self.deadline,
            &mut self.scratch,
            position,
        );
        let progress = self.running.advance(&mut ctx, self.buffer.bytes_mut());
        self.state = match progress {
            Ok(progress) => OpState::Running(progress),
            Err(error) => OpState::Failed(error),
        };
    }

    /// Reports the outcome, and then lets the next operation have its turn.
    fn end(mut self, outcome: Result<()>) -> Scratch {
        self.scratch.clear(0);
        let end = OpOutcome::of(&outcome);
        self.timer.end(&self.fingerprint, end, &self.deadline);
        let buffer = self.buffer;
        self.completion.complete(outcome.map(|()| buffer));
        drop(self.permit);
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
        element::{DType, ReduceOp},
        error::Kind,
        fingerprint::{CallSite, OpKind},
        group::{
            GroupOptions, ProcessGroup,
            pending::{self, Pending, SlotPool},
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
        let rank_state = &*ranks[0].handle.rank_state;
        let mut ops = InFlightOps {
            rank_state,
            ops: VecDeque::new(),
            next: None,
            spare: Vec::new(),
        };
        let slots = SlotPool::default();
        let lost = Error::new(Kind::PeerLost, "rank 1 is lost");
        let states = [
            OpState::Running(OpProgress::Done),
            OpState::Failed(lost),
            OpState::Running(OpProgress::Done),
        ];
        let pending = states.map(|state| {
            let (pending, completion) = slots.pair();
            ops.start(Job {
                ticket: rank_state.admit(&fingerprint()).unwrap(),
                fingerprint: fingerprint(),
                buffer: Buffer::zeroed(DType::F32, 3),
                op: BufferOp::AllReduce(ReduceOp::Sum),
                completion,
            });
            ops.ops.back_mut().unwrap().state = state;
            pending
        });
        assert!(ops.complete_ready());
        let [before, failed, after] = pending.map(Pending::wait);
        assert_eq!(before.unwrap().len(), 3);
        assert!(failed.unwrap_err().is_peer_lost());
        assert!(after.unwrap_err().is_peer_lost());
    }

    #[test]
    fn nobody_waits_for_a_thread_that_panicked() {
        let ranks = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        let rank_state = Arc::clone(&ranks[0].handle.rank_state);
        let fingerprint = fingerprint();
        let (sender, jobs) = pending::channel();
        let slots = SlotPool::default();
        let pending: Vec<Pending> = (0..3)
            .map(|_| {
                let (pending, completion) = slots.pair();
                let job = Job {
                    ticket: rank_state.admit(&fingerprint).unwrap(),
                    fingerprint,
                    buffer: Buffer::zeroed(DType::F32, 3),
                    op: BufferOp::AllReduce(ReduceOp::Sum),
                    completion,
                };
                assert!(sender.send(job).is_ok());
                pending
            })
            .collect();
        let after = rank_state.admit(&fingerprint).unwrap();
        let thread = thread::spawn({
            let rank_state = Arc::clone(&rank_state);
            move || {
                let _jobs = jobs;
                let _abort_on_panic = AbortOnPanic {
                    rank_state: &rank_state,
                };
                panic!("the communication thread stumbled");
            }
        });
        assert!(thread.join().is_err());
        for pending in pending {
            assert!(pending.wait().unwrap_err().is_closed());
        }
        let (done, ends) = mpsc::channel();
        thread::spawn(move || {
            let outcome = rank_state.perform(
                ExecThread::Caller,
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
