//! Process groups: what programs call.

mod choice;
mod engine;
mod flights;
mod line;
mod member;
mod objects;
mod observer;
mod options;
mod panics;
mod pending;
mod pulse;

use std::{
    fmt,
    panic::Location,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

pub(crate) use choice::Key;
pub use observer::{Observed, Runner};
pub use options::GroupOptions;
pub use pending::Pending;

use engine::Exchange;
use flights::Job;
use member::Member;

use crate::{
    buffer::Buffer,
    contract::{Call, Contract, Site},
    element::{DType, Element},
    error::{Error, Kind, Result},
    partition::Partition,
    reduce::ReduceOp,
    rendezvous::StoreLine,
    topology::{Launch, Topology},
    transport::{Tcp, Threads, Transport, TransportKind},
};

/// One rank's handle on a group of ranks that compute together.
///
/// Every rank calls the same collectives in the same order. An operation ends when it is done on
/// this rank, or with an error that says which rank is missing, gone or at odds with the others;
/// it never waits for ever. A group that failed answers every later operation with the same
/// error.
///
/// Handles are cheap to clone and may be used from several threads; the operations of one rank
/// begin and end in the order in which they were called, though several that were started may be
/// under way at once. Results have the same bits on
/// every rank, run after run, over every transport that [groups the ranks alike](ReduceOp).
///
/// ```
/// use std::thread;
///
/// use accelerator_collective::{GroupOptions, ProcessGroup, ReduceOp};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
/// thread::scope(|scope| {
///     for group in ranks {
///         scope.spawn(move || {
///             let mut values = [1.0_f32, group.rank() as f32];
///             group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
///             assert_eq!(values, [2.0, 1.0]);
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ProcessGroup(Arc<Handle>);

impl ProcessGroup {
    /// A world of one: every collective gives back what it gets, at no cost.
    ///
    /// ```
    /// use accelerator_collective::ProcessGroup;
    ///
    /// let group = ProcessGroup::single();
    /// assert_eq!(group.world_size(), 1);
    /// assert!(group.barrier().is_ok());
    /// ```
    pub fn single() -> Self {
        Self::alone(&GroupOptions::new())
    }

    /// The ranks of a new world whose members are threads of this process, in rank order.
    ///
    /// # Errors
    ///
    /// A topology error for a world of none; a misuse error for a timeout of zero, for another
    /// transport, or for planned faults that this program cannot carry out.
    pub fn threads(world_size: usize, options: &GroupOptions) -> Result<Vec<Self>> {
        options.check()?;
        check_faults()?;
        let transport = options.transport();
        if !matches!(transport, TransportKind::Auto | TransportKind::Threads) {
            return Err(Error::new(
                Kind::Misuse,
                format!("threads of one process cannot be connected by the {transport} transport"),
            ));
        }
        Topology::new(0, world_size)?;
        Threads::world(world_size)?
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| {
                let topology = Topology::new(rank, world_size)?;
                Self::join(topology, options, Box::new(transport), None)
            })
            .collect()
    }

    /// Finds the other ranks of a launch and connects to them.
    ///
    /// # Errors
    ///
    /// - a misuse error for a timeout of zero, for a transport that does not connect processes, or
    ///   for planned faults that this program cannot carry out;
    /// - a topology error where the launch does not say where the ranks meet;
    /// - a rendezvous error where the ranks do not find one another within the connect timeout,
    ///   or disagree about the job;
    /// - a peer-lost error that names the rank that is gone before all are connected;
    /// - an unauthorized error where the job token is missing, or wrong on either side;
    /// - an address-in-use error where rank 0 is to host the store and its address is taken;
    /// - a topology error, the same on every rank, where shared memory was asked for and there is
    ///   none that all ranks can reach;
    /// - a protocol error where the store, or what is at its address, does not speak as it should;
    /// - an I/O error where the operating system refuses a socket, a file or a thread.
    pub fn connect(launch: &Launch, options: &GroupOptions) -> Result<Self> {
        options.check()?;
        check_faults()?;
        if launch.topology.world_size() == 1 {
            return Ok(Self::alone(&options.completed_by(launch)));
        }
        let asked = match options.transport() {
            TransportKind::Auto => launch.transport,
            other => other,
        };
        if asked == TransportKind::Threads {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "processes cannot be connected by the {asked} transport; ACCEL_TRANSPORT and \
                     the group's options allow auto, hierarchical, shm or tcp"
                ),
            ));
        }
        let Some(rendezvous) = &launch.rendezvous else {
            return Err(Error::new(
                Kind::Topology,
                format!(
                    "the launch of {} does not say where the ranks meet",
                    launch.topology
                ),
            ));
        };
        let patience = options.connect_timeout();
        let options = &options.completed_by(launch);
        let liveness = options.liveness_timeout();
        let meeting = rendezvous.meet(&launch.topology, patience, liveness)?;
        let line = meeting.line.clone();
        let transport = Tcp::connect(&launch.topology, meeting, patience)?;
        let group = Self::join(launch.topology, options, Box::new(transport), line)?;
        choice::choose(&group.0.member, asked)?;
        Ok(group)
    }

    /// This rank's place.
    pub fn topology(&self) -> &Topology {
        &self.0.member.topology
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.topology().rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.topology().world_size()
    }

    /// The options with which the group was made.
    pub fn options(&self) -> &GroupOptions {
        &self.0.member.options
    }

    /// The transport that connects the ranks.
    pub fn transport(&self) -> TransportKind {
        self.0.member.transport.kind()
    }

    /// Reduces the values of all ranks, element by element, in place.
    ///
    /// [`ReduceOp`] says how elements are combined.
    ///
    /// # Errors
    ///
    /// - a mismatch error, with the same text on every rank, where the ranks call different
    ///   operations or pass different lengths, element types or reductions;
    /// - a peer-lost error that names the rank that is gone;
    /// - a timeout error that names the ranks that did not come within the progress timeout;
    /// - a misuse error where collectives are [forbidden](Self::forbid), a closed error after
    ///   [`close`](Self::close).
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let contract = Contract::new(Call::AllReduce, Site::of(Location::caller()))
            .with_op(op)
            .with_data(T::DTYPE, values.len());
        self.run(&contract, |exchange| {
            exchange.all_reduce(T::DTYPE, op, bytemuck::cast_slice_mut(values))
        })
    }

    /// Starts to reduce a buffer over all ranks and returns at once.
    ///
    /// Started operations run on a communication thread of the group, in the order in which all
    /// operations of this rank were called; a blocking operation waits for those that were
    /// started before it.
    ///
    /// ```
    /// use accelerator_collective::{DType, ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let group = ProcessGroup::single();
    /// let mut buffer = group.buffer(DType::F32, 2);
    /// buffer.as_mut_slice::<f32>()?.copy_from_slice(&[1.0, 2.0]);
    /// let pending = group.start_all_reduce(buffer, ReduceOp::Mean)?;
    /// // Compute something else here.
    /// let buffer = pending.wait()?;
    /// assert_eq!(buffer.as_slice::<f32>()?, [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// At once where the operation is not admitted or the communication thread cannot be
    /// started; otherwise from [`Pending::wait`], as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn start_all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        let contract = Contract::new(Call::AllReduce, Site::of(Location::caller()))
            .with_op(op)
            .with_data(buffer.dtype(), buffer.len());
        self.0.start(contract, buffer, op)
    }

    /// Reduces the values of all ranks, element by element, in place and without a copy where the
    /// buffer lies in the transport's memory; see [`buffer`](Self::buffer).
    ///
    /// It runs on the calling thread. Ranks that pass slices to [`all_reduce`](Self::all_reduce)
    /// at the same time take part in the same operation.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{DType, GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// thread::scope(|scope| {
    ///     for group in ranks {
    ///         scope.spawn(move || -> accelerator_collective::Result<()> {
    ///             let mut buffer = group.buffer(DType::F32, 100_000);
    ///             buffer.as_mut_slice::<f32>()?.fill(1.5);
    ///             group.all_reduce_buffer(&mut buffer, ReduceOp::Sum)?;
    ///             assert!(buffer.as_slice::<f32>()?.iter().all(|x| *x == 3.0));
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce). The buffer's contents are then unspecified.
    #[track_caller]
    pub fn all_reduce_buffer(&self, buffer: &mut Buffer, op: ReduceOp) -> Result<()> {
        let contract = Contract::new(Call::AllReduce, Site::of(Location::caller()))
            .with_op(op)
            .with_data(buffer.dtype(), buffer.len());
        self.run(&contract, |exchange| exchange.all_reduce_buffer(op, buffer))
    }

    /// Gives every rank the root's values.
    ///
    /// # Errors
    ///
    /// A misuse error where the root is no rank; otherwise as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        let contract = Contract::new(Call::Broadcast, Site::of(Location::caller()))
            .with_data(T::DTYPE, values.len())
            .with_root(root);
        self.run(&contract, |exchange| {
            exchange.broadcast(root, bytemuck::cast_slice_mut(values))
        })
    }

    /// Gives every rank the values of all ranks, one after the other in rank order. All ranks
    /// pass equally many.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        let contract = Contract::new(Call::AllGather, Site::of(Location::caller()))
            .with_data(T::DTYPE, values.len());
        let len = values.len();
        let mut all = vec![T::zeroed(); len * self.world_size()];
        all[self.rank() * len..][..len].copy_from_slice(values);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut all);
        let part = size_of_val(values);
        let mut next: Vec<usize> = (0..self.world_size()).map(|rank| rank * part).collect();
        self.run(&contract, |exchange| {
            exchange.all_gather(bytemuck::cast_slice(values), |rank, piece| {
                bytes[next[rank]..][..piece.len()].copy_from_slice(piece);
                next[rank] += piece.len();
            })
        })?;
        Ok(all)
    }

    /// Gives every rank the values of each rank. Ranks may pass different numbers of values.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce), except that lengths may differ.
    #[track_caller]
    pub fn all_gather_varied<T: Element>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        let contract = Contract::new(Call::AllGatherVaried, Site::of(Location::caller()))
            .with_data(T::DTYPE, values.len());
        let mut all = vec![Vec::new(); self.world_size()];
        all[self.rank()].extend_from_slice(values);
        self.run(&contract, |exchange| {
            // A piece is a whole number of elements, aligned to a cache line.
            exchange.all_gather(bytemuck::cast_slice(values), |rank, piece| {
                all[rank].extend_from_slice(bytemuck::cast_slice(piece));
            })
        })?;
        Ok(all)
    }

    /// Reduces the values of all ranks and gives rank `r` the `r`-th part of the result, as
    /// [`Partition`] cuts it.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, values: &[T], op: ReduceOp) -> Result<Vec<T>> {
        let contract = Contract::new(Call::ReduceScatter, Site::of(Location::caller()))
            .with_op(op)
            .with_data(T::DTYPE, values.len());
        let part = Partition::new(values.len(), self.world_size()).range(self.rank());
        let mut own = values[part].to_vec();
        self.run(&contract, |exchange| {
            exchange.reduce_scatter(
                T::DTYPE,
                op,
                bytemuck::cast_slice(values),
                bytemuck::cast_slice_mut(&mut own),
            )
        })?;
        Ok(own)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let contract = Contract::new(Call::Barrier, Site::of(Location::caller()));
        self.run(&contract, |exchange| exchange.barrier())
    }

    /// A buffer of zeros, placed where the group's transport reduces it best.
    ///
    /// # Panics
    ///
    /// As a `Vec` does, where the memory does not suffice.
    pub fn buffer(&self, dtype: DType, len: usize) -> Buffer {
        let buffer = self.0.member.transport.buffer(dtype, len);
        buffer.counted_by(&self.0.member.buffers)
    }

    /// The bytes of the buffers of this rank that live: those that [`buffer`](Self::buffer) has
    /// made and nobody has dropped.
    ///
    /// ```
    /// use accelerator_collective::{DType, ProcessGroup};
    ///
    /// let group = ProcessGroup::single();
    /// let buffer = group.buffer(DType::F64, 1000);
    /// assert!(group.buffer_bytes() >= 8000);
    /// drop(buffer);
    /// assert_eq!(group.buffer_bytes(), 0);
    /// ```
    pub fn buffer_bytes(&self) -> usize {
        self.0.member.buffers.bytes()
    }

    /// Calls `observer` after each operation of this rank, before its result is given out: to
    /// measure, not to compute. It runs on the thread that ran the operation, must not wait, and must
    /// call no collective. Nothing is measured where nobody observes.
    ///
    /// ```
    /// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
    ///
    /// use accelerator_collective::{ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let group = ProcessGroup::single();
    /// let bytes = Arc::new(AtomicUsize::new(0));
    /// let sum = Arc::clone(&bytes);
    /// group.observe(move |operation| {
    ///     sum.fetch_add(operation.bytes, Ordering::Relaxed);
    /// })?;
    /// group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum)?;
    /// assert_eq!(bytes.load(Ordering::Relaxed), 32);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A misuse error where this rank has an observer already.
    pub fn observe(&self, observer: impl Fn(&Observed) + Send + Sync + 'static) -> Result<()> {
        self.0.member.observe(Box::new(observer))
    }

    /// Forbids collectives on all handles of this rank while the guard lives.
    ///
    /// A collective that only some ranks reach would wait for the others in vain; around code
    /// that runs on one rank alone, this turns it into a misuse error at once, with the reason.
    /// The group stays usable.
    ///
    /// ```
    /// use accelerator_collective::ProcessGroup;
    ///
    /// let group = ProcessGroup::single();
    /// let guard = group.forbid("only the main rank runs this closure");
    /// let error = group.barrier().unwrap_err();
    /// assert!(error.is_misuse());
    /// assert!(error.to_string().ends_with("only the main rank runs this closure"));
    /// drop(guard);
    /// assert!(group.barrier().is_ok());
    /// ```
    pub fn forbid(&self, reason: impl Into<String>) -> Forbidden {
        let reason: Arc<str> = reason.into().into();
        self.0.member.forbid(Arc::clone(&reason));
        Forbidden {
            group: self.clone(),
            reason,
        }
    }

    /// Leaves the group in good order, after everything that was started. Later collectives of
    /// this rank fail, and those of other ranks say that this rank finished.
    ///
    /// A rank that drops its last handle without this leaves as well, and waits for started
    /// operations only for a moment. Where others then still need it, they say that it is lost:
    /// its program returned early or failed.
    ///
    /// # Errors
    ///
    /// None so far: closing a group that failed or is closed does nothing.
    pub fn close(&self) -> Result<()> {
        self.0.member.close();
        Ok(())
    }

    /// Ends the group because this rank fails, for a reason that the program knows: the others'
    /// pending and next collectives fail with an error that names this rank and says why. Later
    /// collectives of this rank fail with the same error.
    ///
    /// The reason goes on from "rank 1 is lost: ", as in "its data set is empty". A group that
    /// has failed before, or is closed, stays as it is.
    ///
    /// ```
    /// use accelerator_collective::{GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// ranks[1].abort("its data set is empty");
    /// let error = ranks[0].barrier().unwrap_err();
    /// assert!(error.is_peer_lost());
    /// assert!(error.to_string().contains("rank 1 (a thread of this process) is lost: its data set is empty"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort(&self, reason: impl Into<String>) {
        self.0.member.abort(&reason.into());
    }

    /// The ranks that are gone as far as this rank knows, in ascending order: those that failed by
    /// themselves, whose connection ended, that were silent for too long, that left or dropped
    /// their group, or that another rank or the launcher reports so. This rank itself is among
    /// them where it failed by itself or others gave it up.
    ///
    /// An error names the [culprit](Error::culprit) alone; several ranks may have died with it. A
    /// rank that gave up because of them is not lost: it may still run. What it does afterwards
    /// is not observed.
    ///
    /// In a group that failed, this waits up to half a second for news of ranks that are not
    /// heard of yet. Nothing is sent. Ranks that can reach one another come to the same answer,
    /// except where one dies, or is slow to notice the failure, just then; where the network
    /// splits, each side takes the other for lost.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(4, &GroupOptions::new())?;
    /// assert!(ranks[3].lost().is_empty());
    /// ranks[1].abort("its host is on fire");
    /// ranks[0].abort("its host is on fire");
    /// thread::scope(|scope| {
    ///     for survivor in &ranks[2..] {
    ///         scope.spawn(|| {
    ///             assert!(survivor.barrier().unwrap_err().is_peer_lost());
    ///             assert_eq!(survivor.lost(), [0, 1]);
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn lost(&self) -> Vec<usize> {
        self.0.member.lost()
    }

    #[cfg(test)]
    pub(crate) fn inbox(&self) -> &crate::transport::Inbox {
        self.0.member.transport.inbox()
    }

    #[cfg(test)]
    pub(crate) fn world(&self) -> Option<&crate::shared::World> {
        self.0.member.transport.shared()
    }

    fn alone(options: &GroupOptions) -> Self {
        let transport = Box::new(Threads::alone());
        let member = Member::new(Topology::single(), options.clone(), transport, None);
        Self(Arc::new(Handle {
            member: Arc::new(member),
            jobs: Mutex::new(None),
        }))
    }

    pub(crate) fn join(
        topology: Topology,
        options: &GroupOptions,
        transport: Box<dyn Transport>,
        line: Option<StoreLine>,
    ) -> Result<Self> {
        let member = Arc::new(Member::new(topology, options.clone(), transport, line));
        member.wake()?;
        Ok(Self(Arc::new(Handle {
            member,
            jobs: Mutex::new(None),
        })))
    }

    fn run(
        &self,
        contract: &Contract,
        body: impl FnOnce(Exchange<'_>) -> Result<()>,
    ) -> Result<()> {
        let ticket = self.0.member.admit(contract)?;
        self.0
            .member
            .perform(Runner::Caller, ticket, contract, body, |outcome| outcome)
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProcessGroup").field(&self.0.member).finish()
    }
}

fn check_faults() -> Result<()> {
    let refused = "the planned faults cannot be carried out";
    accelerator_fault::check().map_err(|error| Error::caused(Kind::Misuse, refused, error))
}

/// While it lives, collectives of this rank fail; see [`ProcessGroup::forbid`].
#[derive(Debug)]
#[must_use = "collectives are allowed again when this is dropped"]
pub struct Forbidden {
    group: ProcessGroup,
    reason: Arc<str>,
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        self.group.0.member.allow(&self.reason);
    }
}

/// What the handles of one rank share, beside the membership that its communication thread
/// shares too. When the last handle is dropped, the rank leaves.
struct Handle {
    member: Arc<Member>,
    /// The way to the communication thread, which starts with the first job and ends when the
    /// handle is dropped.
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
}

impl Handle {
    fn start(&self, contract: Contract, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        // Held until the job is on its way, so that jobs are queued in the order of their
        // tickets. A sender is whole at every moment.
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let alone = self.member.topology.world_size() == 1;
        if jobs.is_none() && !alone {
            *jobs = Some(self.spawn()?);
        }
        let ticket = self.member.admit(&contract)?;
        let (pending, completion) = Pending::new();
        let job = Job {
            ticket,
            contract,
            buffer,
            op,
            completion,
        };
        match &*jobs {
            Some(jobs) => {
                if let Err(mpsc::SendError(job)) = jobs.send(job) {
                    // The thread is gone; the ticket must be served all the same.
                    job.run(&self.member);
                } else {
                    self.member.transport.inbox().nudge();
                }
            }
            None => job.run(&self.member),
        }
        Ok(pending)
    }

    fn spawn(&self) -> Result<mpsc::Sender<Job>> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let member = Arc::clone(&self.member);
        thread::Builder::new()
            .name(format!("collective-{}", member.topology.rank()))
            .spawn(move || flights::serve(&member, &jobs))
            .map_err(|error| Error::io("the communication thread cannot be started", error))?;
        Ok(sender)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.member.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The test below runs this one in a process of its own.
    #[test]
    fn groups_are_made() {
        let options = GroupOptions::new();
        let launch = Launch::new(Topology::single(), crate::Rendezvous::new("127.0.0.1", 1));
        let connected = ProcessGroup::connect(&launch, &options).map(drop);
        let threads = ProcessGroup::threads(2, &options).map(drop);
        if std::env::var_os(accelerator_fault::VARIABLE).is_none() {
            assert!(connected.is_ok() && threads.is_ok());
            return;
        }
        for error in [connected.unwrap_err(), threads.unwrap_err()] {
            assert!(error.is_misuse(), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("the planned faults cannot be carried out: "),
                "{text}"
            );
        }
    }

    #[test]
    fn a_plan_of_faults_that_cannot_be_read_is_refused() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "group::tests::groups_are_made"])
            .env(accelerator_fault::VARIABLE, "rank=0 step=1 dance")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
    }
}
