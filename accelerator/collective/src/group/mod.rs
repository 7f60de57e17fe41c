//! Process groups, and the handle that programs call.

mod collectives;
mod data_path;
mod engine;
mod flight_recorder;
mod in_flight;
mod internal;
mod lifecycle;
mod observer;
mod options;
mod pending;
mod rank_state;
mod split;

use std::{fmt, panic::Location, sync::Arc, thread, time::Instant};

pub use internal::{Forbidden, NextPlace};
pub use lifecycle::{Activity, Busy};
pub use observer::{ExecThread, OpEvent};
pub use options::GroupOptions;
pub use pending::Pending;

use engine::{BufferOp, OpContext};
use in_flight::Job;
use pending::SlotPool;
use rank_state::RankState;

use crate::{
    buffer::Buffer,
    element::DType,
    error::{Error, Kind, Result},
    fingerprint::{CallSite, CollectiveFingerprint, Purpose},
    launch::Launch,
    rendezvous::{Key, StoreClient},
    topology::{Topology, TransportKind},
    transport::{Tcp, Threads, Transport},
};
use accelerator_host::sync::Mutex;

/// One rank's handle on a group of ranks that compute together.
///
/// Every rank calls the same collectives in the same order. An operation ends when it is done on
/// this rank, or with an error that says which rank is missing, gone or at odds with the others;
/// it never waits forever. After a failure, every later operation on the group returns the same
/// error.
///
/// Handles are cheap to clone and may be used from several threads; the operations of one rank
/// begin and end in the order in which they were called, though several that were started may be
/// under way at once. Results have the same bits on
/// every rank, run after run, over every transport that [groups the ranks alike](crate::ReduceOp).
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
///
/// The other collectives:
///
/// ```
/// use std::thread;
///
/// use accelerator_collective::{GroupOptions, ProcessGroup, ReduceOp, Result, TransportKind};
///
/// fn exchange(group: &ProcessGroup) -> Result<()> {
///     let rank = group.topology().rank();
///     assert_eq!(group.all_gather(&[rank as u32])?, [0, 1]);
///     assert_eq!(group.all_gather_varied(&vec![7_u8; rank])?, [vec![], vec![7]]);
///
///     let mut values = [rank as f32; 2];
///     group.broadcast(&mut values, 1)?;
///     assert_eq!(values, [1.0, 1.0]);
///
///     // Rank 0 gets the first two sums, rank 1 the last one.
///     let mine = group.reduce_scatter(&[1_i64, 2, 3], ReduceOp::Sum)?;
///     assert_eq!(mine, [vec![2, 4], vec![6]][rank]);
///
///     let names = group.gather_object(&format!("rank {rank}"), 0)?;
///     assert_eq!(names.is_some(), rank == 0);
///     let said: String = group.broadcast_object((rank == 0).then_some(&"go".to_owned()), 0)?;
///     assert_eq!(said, "go");
///     Ok(())
/// }
///
/// # fn main() -> Result<()> {
/// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
/// assert_eq!(ranks[0].transport(), TransportKind::Threads);
/// thread::scope(|scope| {
///     let ranks: Vec<_> = ranks.iter().map(|group| scope.spawn(|| exchange(group))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    handle: Arc<GroupHandle>,
    purpose: Purpose,
    caller: Option<&'static Location<'static>>,
}

impl ProcessGroup {
    /// A world of one: every collective gives back what it gets, at no cost.
    pub fn single() -> Self {
        Self::alone(&GroupOptions::new(), None)
    }

    /// The ranks of a new world whose ranks are threads of this process, in rank order.
    ///
    /// # Errors
    ///
    /// A topology error for a world of none; a misuse error for a timeout of zero, for another
    /// transport, or for planned faults that this program cannot carry out.
    pub fn threads(world_size: usize, options: &GroupOptions) -> Result<Vec<Self>> {
        options.check()?;
        check_faults()?;
        let transport = options.transport;
        if !matches!(transport, TransportKind::Auto | TransportKind::Threads) {
            return Err(Error::misuse(format!(
                "threads of one process cannot be connected by the {transport} transport"
            )));
        }
        Topology::new(0, world_size)?;
        Threads::world(world_size)?
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| {
                let topology = Topology::new(rank, world_size)?;
                Self::join(topology, options, transport, None, None)
            })
            .collect()
    }

    /// Finds the other ranks of a launch and connects to them.
    ///
    /// # Errors
    ///
    /// - a misuse error for a timeout of zero, for a transport that does not connect processes, or
    ///   for planned faults that this program cannot carry out;
    /// - a topology error if the launch does not say where the ranks meet; if it gives no local rank and the system
    ///   cannot tell which ranks share a host; or if the ranks must ask their launcher and cannot reach it;
    /// - a rendezvous error if the ranks do not find one another within the connect timeout,
    ///   disagree about the job, have impossible local ranks, or were asked to use different transports;
    /// - a peer-lost error that names the rank that is gone before all are connected;
    /// - an unauthorized error if the job token is missing, or wrong on either side;
    /// - an address-in-use error if rank 0 is to host the store and its address is taken;
    /// - a topology error, the same on every rank, if shared memory was asked for and there is
    ///   none that all ranks can reach;
    /// - a protocol error if the process at the store's address does not speak the store's protocol;
    /// - an I/O error if the operating system refuses a socket, a file or a thread.
    pub fn connect(launch: &Launch, options: &GroupOptions) -> Result<Self> {
        options.check()?;
        check_faults()?;
        if launch.is_alone() {
            return Ok(Self::alone(&options.completed_by(launch), None));
        }
        let asked = match options.transport {
            TransportKind::Auto => launch.transport,
            other => other,
        };
        if asked == TransportKind::Threads {
            return Err(Error::misuse(format!(
                "processes cannot be connected by the {asked} transport; ACCEL_TRANSPORT and \
                     the group's options allow auto, hierarchical, shm or tcp"
            )));
        }
        let connect_timeout = options.connect_timeout;
        #[cfg(unix)]
        allow_connections(launch.topology.world_size())?;
        let options = &options.completed_by(launch);
        let liveness = options.liveness_timeout();
        let mut began = Instant::now();
        let meeting = launch.meet(connect_timeout, liveness, asked)?;
        if began.elapsed() > connect_timeout {
            // It has joined a running job.
            began = Instant::now();
        }
        let topology = launch.met(&meeting.ranks)?;
        let store = meeting.store.clone();
        if topology.world_size() == 1 {
            store.iter().for_each(StoreClient::connected);
            return Ok(Self::alone(options, store));
        }
        let key = meeting.key.clone();
        let transport = Tcp::connect(&topology, meeting, connect_timeout)?.into_transport();
        let group = Self::join(topology, options, transport, store, Some(key))?;
        data_path::negotiate(&group.handle.rank_state, asked, began)?;
        group.handle.rank_state.enable_heartbeats();
        Ok(group)
    }

    /// This rank's place.
    pub fn topology(&self) -> &Topology {
        &self.handle.rank_state.topology
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
        &self.handle.rank_state.options
    }

    /// The transport that connects the ranks.
    pub fn transport(&self) -> TransportKind {
        self.handle.rank_state.transport.kind()
    }

    /// A handle whose operations are for `purpose`, a few words that precede the operation's name in messages and
    /// are truncated to 40 bytes. It must be the same on every rank: ranks that exchange values for different
    /// purposes get a mismatch error, even if the values look alike.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// thread::scope(|scope| {
    ///     for (group, purpose) in ranks.into_iter().zip(["the vote", "the loss"]) {
    ///         scope.spawn(move || {
    ///             let error = group.for_purpose(purpose).all_gather_object(&1).unwrap_err();
    ///             assert!(error.is_mismatch());
    ///             assert!(error.to_string().contains("rank 1: the loss (all_gather_object"));
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn for_purpose(&self, purpose: &str) -> Self {
        Self {
            purpose: Purpose::new(purpose),
            ..self.clone()
        }
    }

    /// Returns a handle whose operations name `caller` as their call site: for a library that runs them in a callback,
    /// or deep below the call of the program.
    ///
    /// ```
    /// use std::panic::Location;
    ///
    /// use accelerator_collective::{ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let group = ProcessGroup::single();
    /// let here = Location::caller();
    /// group.observe(move |operation| assert_eq!(operation.place().to_string(), format!("{}:{}", here.file(), here.line())))?;
    /// group.for_caller(here).all_reduce(&mut [1.0_f32], ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn for_caller(&self, caller: &'static Location<'static>) -> Self {
        Self {
            caller: Some(caller),
            ..self.clone()
        }
    }

    /// A buffer of zeros, placed where the group's transport reduces it best.
    ///
    /// # Panics
    ///
    /// Panics as a `Vec` does, if the memory does not suffice.
    pub fn buffer(&self, dtype: DType, len: usize) -> Buffer {
        let buffer = self.handle.rank_state.transport.buffer(dtype, len);
        buffer.counted_by(&self.handle.rank_state.buffers)
    }

    #[cfg(test)]
    pub(crate) fn inbox(&self) -> &crate::transport::Inbox {
        self.handle.rank_state.transport.inbox()
    }

    #[cfg(test)]
    pub(crate) fn shm_peers(&self) -> Option<&crate::shm::ShmPeers> {
        self.handle.rank_state.transport.shared()
    }

    fn alone(options: &GroupOptions, store: Option<StoreClient>) -> Self {
        let transport = Threads::alone();
        let rank_state = RankState::new(Topology::single(), options.clone(), transport, store);
        Self::of(Arc::new(rank_state), None, None)
    }

    pub(crate) fn join(
        topology: Topology,
        options: &GroupOptions,
        transport: Transport,
        store: Option<StoreClient>,
        key: Option<Key>,
    ) -> Result<Self> {
        let rank_state = Arc::new(RankState::new(topology, options.clone(), transport, store));
        rank_state.start_failure_detection()?;
        Ok(Self::of(rank_state, key, None))
    }

    fn of(rank_state: Arc<RankState>, key: Option<Key>, parent: Option<Arc<GroupHandle>>) -> Self {
        let slots = SlotPool::new(rank_state.wait_clock());
        Self {
            handle: Arc::new(GroupHandle {
                rank_state,
                jobs: Mutex::new(None),
                slots,
                key,
                _parent: parent,
            }),
            purpose: Purpose::NONE,
            caller: None,
        }
    }

    /// Returns the call site of an operation: that of the handle, else the caller of the method that calls this one.
    #[track_caller]
    fn site(&self) -> CallSite {
        CallSite::of(self.location())
    }

    /// Returns the place of [`site`](Self::site).
    #[track_caller]
    fn location(&self) -> &'static Location<'static> {
        self.caller.unwrap_or(Location::caller())
    }

    fn run(
        &self,
        fingerprint: &CollectiveFingerprint,
        body: impl FnOnce(OpContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let fingerprint = &fingerprint.with_purpose(self.purpose);
        let ticket = self.handle.rank_state.admit(fingerprint)?;
        self.handle
            .rank_state
            .perform(ExecThread::Caller, ticket, fingerprint, body, |outcome| {
                outcome
            })
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProcessGroup")
            .field(&self.handle.rank_state)
            .finish()
    }
}

fn check_faults() -> Result<()> {
    let refused = "the planned faults cannot be carried out";
    accelerator_fault::check().map_err(|error| Error::caused(Kind::Misuse, refused, error))
}

/// Raises the limit of open files so that this process can connect to every other rank, and can also host the store.
#[cfg(unix)]
fn allow_connections(world_size: usize) -> Result<()> {
    /// The files that a program and a group usually have open besides.
    const OTHERS: u64 = 128;
    let ranks = world_size as u64;
    match accelerator_host::process::allow_descriptors(2 * ranks + OTHERS) {
        Err(allowed) if allowed < ranks + OTHERS => Err(Error::misuse(format!(
            "with {ranks} ranks, each process needs about {} open files and sockets, but the system allows only {allowed}; \
             raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE=, a container's --ulimit nofile=), or start fewer \
             ranks",
            ranks + OTHERS
        ))),
        _ => Ok(()),
    }
}

/// The state that the handles of one rank share, besides the [`RankState`], which its communication thread shares, too.
/// When the last handle is dropped, the rank leaves.
struct GroupHandle {
    rank_state: Arc<RankState>,
    /// The way to the communication thread, which starts with the first job and ends when the
    /// handle is dropped.
    jobs: Mutex<Option<pending::Sender<Job>>>,
    /// The slots in which started operations hand over their results.
    slots: SlotPool,
    /// The key by which the ranks recognize one another, if they are processes.
    key: Option<Key>,
    /// The group of which this one is a part, which stays open as long.
    _parent: Option<Arc<GroupHandle>>,
}

impl GroupHandle {
    fn start(
        &self,
        fingerprint: CollectiveFingerprint,
        buffer: Buffer,
        op: BufferOp,
    ) -> Result<Pending> {
        // Held until the job is on its way, so that jobs are queued in the order of their tickets.
        let mut jobs = self.jobs.lock();
        let alone = self.rank_state.topology.world_size() == 1;
        if jobs.is_none() && !alone {
            *jobs = Some(self.spawn()?);
        }
        let ticket = self.rank_state.admit(&fingerprint)?;
        let (pending, completion) = self.slots.pair();
        let job = Job {
            ticket,
            fingerprint,
            buffer,
            op,
            completion,
        };
        match &*jobs {
            Some(jobs) => {
                if let Err(job) = jobs.send(job) {
                    // The thread is gone; the ticket must be served all the same.
                    job.run(&self.rank_state);
                } else {
                    self.rank_state.transport.inbox().wake();
                }
            }
            None => job.run(&self.rank_state),
        }
        Ok(pending)
    }

    fn spawn(&self) -> Result<pending::Sender<Job>> {
        let (sender, jobs) = pending::channel::<Job>();
        let rank_state = Arc::clone(&self.rank_state);
        thread::Builder::new()
            .name(format!("collective-{}", rank_state.topology.rank()))
            .spawn(move || in_flight::serve(&rank_state, &jobs))
            .map_err(|error| Error::io("the communication thread cannot be started", error))?;
        Ok(sender)
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.rank_state.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::rendezvous::Rendezvous;

    /// The test below runs this one in a process of its own.
    #[test]
    fn groups_are_made() {
        let options = GroupOptions::new();
        let launch = Launch::new(Topology::single(), Rendezvous::new("127.0.0.1", 1));
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
