//! The part of a group that the other crates of this project call, and programs do not.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use accelerator_host::file_memory::FileMemory;
use accelerator_host::{ON_LOSS, SURVIVOR, variable};

use super::engine::BufferOp;
use super::observer::OpEvent;
use super::{Pending, ProcessGroup, rank_state};
use crate::buffer::{Buffer, BufferSlice, GatherLayout};
use crate::element::{DType, Element, ReduceOp};
use crate::error::{Error, Result, Seconds};
use crate::fingerprint::{CollectiveFingerprint, OpKind};
use crate::launch::{Launch, OnLoss};
use crate::rendezvous::Token;
use crate::shard_layout::ShardLayout;

/// A guard that makes collectives of this rank fail while it lives; see [`ProcessGroup::forbid`].
#[derive(Debug)]
#[must_use = "collectives are allowed again when this is dropped"]
pub struct Forbidden {
    group: ProcessGroup,
    reason: Arc<str>,
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        self.group.handle.rank_state.allow(&self.reason);
    }
}

/// The place of a process in the group that follows this one, of another size.
///
/// ```
/// use accelerator_collective::{Launch, ProcessGroup, GroupOptions, internal::NextPlace};
///
/// # fn main() -> accelerator_collective::Result<()> {
/// let next = |place| match place {
///     // This group is closed first.
///     NextPlace::Join(launch) => ProcessGroup::connect(&launch, &GroupOptions::new()).map(Some),
///     NextPlace::Leave => Ok(None),
/// };
/// let group = next(NextPlace::Join(Box::new(Launch::single())))?;
/// assert_eq!(group.map(|group| group.world_size()), Some(1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum NextPlace {
    /// The process is this rank of the next group.
    Join(Box<Launch>),
    /// The process has no rank in the next group, and ends.
    Leave,
}

#[doc(hidden)]
impl ProcessGroup {
    /// Divides the ranks of this group by their hosts. Returns the group of those on this rank's host, and the group of
    /// those that have its local rank on their hosts.
    ///
    /// # Errors
    ///
    /// The errors of [`split`](ProcessGroup::split).
    #[track_caller]
    pub fn split_by_hosts(&self) -> Result<[Self; 2]> {
        let world = self.handle.rank_state.world();
        let (rank, local_rank) = (world.topology.rank(), world.topology.local_rank());
        let replicas = self.split(local_rank, rank)?;
        // The first group has found the hosts.
        let host = world.hosts.get().map_or(0, |hosts| hosts[rank]);
        Ok([self.split(host, local_rank)?, replicas])
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
        self.handle.rank_state.forbid(Arc::clone(&reason));
        Forbidden {
            group: self.clone(),
            reason,
        }
    }

    /// Checks that collectives of this rank are allowed here, for a `call` that communicates only after it
    /// has done something else. Sends nothing.
    ///
    /// # Errors
    ///
    /// A misuse error if they are [forbidden](Self::forbid), with the reason. The group stays usable.
    pub fn check_allowed(&self, call: impl fmt::Display) -> Result<()> {
        self.handle.rank_state.check_allowed(&call)
    }

    /// Aborts the group, like [`abort`](ProcessGroup::abort), because a panic of this thread was caught; the reason is
    /// the panic's message and location. If an unwinding thread drops the last handle of a group, the group aborts by
    /// itself.
    pub fn abort_by_panic(&self) {
        self.handle.rank_state.abort(&rank_state::last_panic());
    }

    /// Returns the message and the location of the latest panic of this thread, for a thread that unwinds. They are
    /// known only in a program with a group of several ranks.
    pub fn last_panic() -> String {
        rank_state::last_panic()
    }

    /// Returns `true` if the launcher has told this process its place in a next group. Nothing is sent or awaited.
    /// Other ranks may learn of theirs a moment earlier or later. It is always `false` without a launcher that does so.
    pub fn has_next_place(&self) -> bool {
        let store = self.handle.rank_state.store.as_ref();
        store.is_some_and(|store| store.has_next_place(|told| of_loss(told).is_none()))
    }

    /// Waits up to `timeout` for the place that the launcher gives this process in the next group. This group may
    /// already be closed.
    ///
    /// # Errors
    ///
    /// A rendezvous error if none comes in time; a topology error if the launcher gives an impossible place.
    pub fn next_place(&self, timeout: Duration) -> Result<NextPlace> {
        let told = told_place(self, timeout, |told| of_loss(told).is_none())?;
        if told.is_empty() {
            return Ok(NextPlace::Leave);
        }
        Ok(NextPlace::Join(Box::new(launch_at(told, self)?)))
    }

    /// Returns `true` if the launcher may give the survivors of a lost rank places in a next group.
    pub fn continues_on_loss(&self) -> bool {
        self.options().on_loss != OnLoss::End
    }

    /// Waits up to `timeout` for the place that the launcher gives this rank after the loss of another one. A second
    /// call waits for a newer place: the launcher gives one if the next group loses a rank before it is complete.
    ///
    /// # Errors
    ///
    /// A rendezvous error if none comes in time; a topology error if the launcher gives an impossible place.
    pub fn survivors_place(&self, timeout: Duration) -> Result<Launch> {
        let told = told_place(self, timeout, |told| of_loss(told).is_some())?;
        if of_loss(&told) != Some(SURVIVOR) {
            return Err(Error::rendezvous(
                "the launcher does not let the ranks continue that are left",
            ));
        }
        launch_at(told, self)
    }

    /// Derives a token from the key of the job, for a protocol of the program's own between the ranks of this group;
    /// nobody sends the token. Each purpose has a different one. Returns `None` if this rank is alone or the ranks are
    /// threads.
    ///
    /// The token is as secret as the job's key: if the ranks have met without a job token, anyone who has recorded
    /// their connections can derive it, too.
    pub fn token(&self, purpose: &str) -> Option<Token> {
        let key = self.handle.key.as_ref()?;
        Some(match self.handle.rank_state.transport.subset() {
            None => key.token(purpose),
            Some(group) => key.token(&format!("{purpose} of group {} of {group}", group.id.0)),
        })
    }

    /// Wraps the zeroed memory of a file in a buffer of as many elements as it holds, for long-lived sums that are never sent.
    /// [`buffer_bytes`](Self::buffer_bytes) does not count it.
    pub fn buffer_of_file(dtype: DType, memory: FileMemory) -> Buffer {
        Buffer::of_file(dtype, memory)
    }

    /// The total size in bytes of this rank's live buffers: those that [`buffer`](ProcessGroup::buffer) has
    /// allocated and that are not dropped yet.
    pub fn buffer_bytes(&self) -> usize {
        self.handle.rank_state.buffers.bytes()
    }

    /// Calls `observer` after each operation of this rank, before the operation returns its result. The observer is
    /// meant to measure, not to compute: it runs on the thread that ran the operation, must not wait, and must not call
    /// a collective. It also sees the operations of groups that are parts of this one, unless they have observers of their
    /// own.
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
    /// A misuse error if this rank has an observer already.
    pub fn observe(&self, observer: impl Fn(&OpEvent) + Send + Sync + 'static) -> Result<()> {
        self.handle.rank_state.observe(Box::new(observer))
    }

    /// The time for which threads of this rank have waited for operations so far, in all its groups: within blocking ones,
    /// and in [`Pending::wait`](crate::Pending::wait).
    pub fn time_waited(&self) -> Duration {
        self.handle.rank_state.wait_clock().total()
    }

    /// Describes a rank, with its process and host where they are known: "rank 2 (process 17 on n3)".
    ///
    /// # Panics
    ///
    /// Panics if the group has no such rank.
    pub fn describe(&self, rank: usize) -> String {
        self.handle.rank_state.transport.peer(rank).to_string()
    }

    /// Gathers as [`all_gather_varied`](ProcessGroup::all_gather_varied) does, but into memory of the caller: `sink`
    /// gets the values of each other rank with its number, piece by piece and in order for each rank. It does not get
    /// the rank's own values.
    ///
    /// # Errors
    ///
    /// The same as for [`all_gather_varied`](ProcessGroup::all_gather_varied).
    #[track_caller]
    pub fn all_gather_varied_with<T: Element>(
        &self,
        values: &[T],
        mut sink: impl FnMut(usize, &[T]),
    ) -> Result<()> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllGatherVaried, self.site())
            .with_data(T::DTYPE, values.len());
        self.run(&fingerprint, |ctx| {
            // A piece is a whole number of elements, aligned to a cache line.
            ctx.gather(
                bytemuck::cast_slice(values),
                |_, _| true,
                |rank, piece| {
                    sink(rank, bytemuck::cast_slice(piece));
                },
            )
        })
    }

    /// Shows every rank parts of the buffers of all ranks, its own included: `sink` gets each part with its rank and
    /// its index among the parts of that rank. All ranks pass buffers of the same lengths, and the same `parts`, listed
    /// by rank; parts of different ranks must not overlap.
    ///
    /// If ranks share memory, they see the parts in place, without a copy. In that case, and after errors, a rank's own
    /// buffers have unspecified contents where the parts of other ranks lie.
    ///
    /// `sink` is called for every part or for none, even if an error is returned: the calls begin only when all parts
    /// of all ranks are there.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::internal::{BufferSlice};
    /// use accelerator_collective::{DType, GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// // Rank 0 has the first four bytes, and rank 1 the rest.
    /// let parts = [0..4, 4..6].map(|bytes| vec![BufferSlice { buffer: 0, bytes }]);
    /// thread::scope(|scope| {
    ///     for group in ranks {
    ///         let parts = &parts;
    ///         scope.spawn(move || -> accelerator_collective::Result<()> {
    ///             let mut buffer = group.buffer(DType::U8, 6);
    ///             buffer.as_mut_slice::<u8>()?.fill(group.rank() as u8 + 1);
    ///             let mut all: Vec<u8> = Vec::new();
    ///             group.all_gather_parts(&mut [&mut buffer], parts, |_, _, bytes| all.extend(bytes))?;
    ///             assert_eq!(all, [1, 1, 1, 1, 2, 2]);
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
    /// A misuse error if parts do not lie within the buffers, or if there are parts for more or fewer ranks than the
    /// group has; a mismatch error if ranks pass different parts; otherwise the errors of
    /// [`all_reduce`](ProcessGroup::all_reduce).
    #[track_caller]
    pub fn all_gather_parts(
        &self,
        buffers: &mut [&mut Buffer],
        parts: &[Vec<BufferSlice>],
        sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let layout = GatherLayout::new(buffers, parts, self.world_size())?;
        let fingerprint = CollectiveFingerprint::new(OpKind::AllGatherParts, self.site())
            .with_data(DType::U8, layout.longest());
        self.run(&fingerprint, |ctx| {
            ctx.all_gather_parts(buffers, &layout, sink)
        })
    }

    /// Reduces the values of all ranks, element by element and in place, but only the elements that this rank keeps by
    /// the `layout`: afterwards they have the bits that [`all_reduce_buffer`](ProcessGroup::all_reduce_buffer) would
    /// give them. All other elements are unspecified.
    ///
    /// All ranks pass buffers of the same length, and the same layout. If they share memory, the elements that a rank
    /// keeps are reduced in place and written once. Over connections, no results travel, so this sends half as much as
    /// an all-reduce. Over [several hosts](crate::TransportKind::Hierarchical), everything is reduced as by an
    /// all-reduce, so that a link carries no more.
    ///
    /// ```
    /// use std::{sync::Arc, thread};
    ///
    /// use accelerator_collective::internal::{ShardLayout};
    /// use accelerator_collective::{DType, GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// // Rank 0 keeps both ends of the buffer, and rank 1 the middle.
    /// let layout = Arc::new(ShardLayout::new(6, vec![vec![0..1, 5..6], vec![1..5]])?);
    /// thread::scope(|scope| {
    ///     for group in ranks {
    ///         let layout = &layout;
    ///         scope.spawn(move || -> accelerator_collective::Result<()> {
    ///             let mut buffer = group.buffer(DType::F32, 6);
    ///             buffer.as_mut_slice::<f32>()?.fill(1.5);
    ///             group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, layout)?;
    ///             for range in layout.of(group.rank()) {
    ///                 let kept = &buffer.as_slice::<f32>()?[range.clone()];
    ///                 assert!(kept.iter().all(|x| *x == 3.0));
    ///             }
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
    /// A misuse error if the layout is for another number of ranks, or for a buffer of another length; a mismatch
    /// error, with the same text on every rank, if ranks pass different layouts; otherwise the errors of
    /// [`all_reduce`](ProcessGroup::all_reduce). After an error, the buffer's contents are unspecified.
    #[track_caller]
    pub fn reduce_scatter_buffer(
        &self,
        buffer: &mut Buffer,
        op: ReduceOp,
        layout: &Arc<ShardLayout>,
    ) -> Result<()> {
        let fingerprint = self.sharded(OpKind::ReduceScatterBuffer, buffer, layout)?;
        let operation = BufferOp::ReduceScatter(op, Arc::clone(layout));
        self.run(&fingerprint.with_op(op), |ctx| {
            ctx.run_buffer_op(&operation, buffer)
        })
    }

    /// Starts a [`reduce_scatter_buffer`](Self::reduce_scatter_buffer) and returns at once, as
    /// [`start_all_reduce`](ProcessGroup::start_all_reduce) does. Ranks that call the blocking one at the
    /// same time take part in the same operation.
    ///
    /// # Errors
    ///
    /// Fails at once if the layout does not fit, the operation is not admitted or the communication thread
    /// cannot be started; otherwise from [`Pending::wait`], as
    /// [`reduce_scatter_buffer`](Self::reduce_scatter_buffer).
    #[track_caller]
    pub fn start_reduce_scatter(
        &self,
        buffer: Buffer,
        op: ReduceOp,
        layout: &Arc<ShardLayout>,
    ) -> Result<Pending> {
        let fingerprint = self.sharded(OpKind::ReduceScatterBuffer, &buffer, layout)?;
        let fingerprint = fingerprint.with_op(op).with_purpose(self.purpose);
        let operation = BufferOp::ReduceScatter(op, Arc::clone(layout));
        self.handle.start(fingerprint, buffer, operation)
    }

    /// Gives every rank the elements that each rank keeps by the `layout`, in place: the counterpart of
    /// [`reduce_scatter_buffer`](Self::reduce_scatter_buffer). Elements that no rank keeps stay as they are.
    ///
    /// All ranks pass buffers of the same length, and the same layout. If they share memory, each rank copies the
    /// elements of the others from where they lie. Over connections, each rank sends its elements to every other one,
    /// also over [several hosts](crate::TransportKind::Hierarchical).
    ///
    /// ```
    /// use std::{sync::Arc, thread};
    ///
    /// use accelerator_collective::internal::{ShardLayout};
    /// use accelerator_collective::{DType, GroupOptions, ProcessGroup};
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let ranks = ProcessGroup::threads(2, &GroupOptions::new())?;
    /// // Rank 0 keeps both ends of the buffer, and rank 1 the middle.
    /// let layout = Arc::new(ShardLayout::new(6, vec![vec![0..1, 5..6], vec![1..5]])?);
    /// thread::scope(|scope| {
    ///     for group in ranks {
    ///         let layout = &layout;
    ///         scope.spawn(move || -> accelerator_collective::Result<()> {
    ///             let mut buffer = group.buffer(DType::U8, 6);
    ///             for range in layout.of(group.rank()) {
    ///                 buffer.as_mut_slice::<u8>()?[range.clone()].fill(group.rank() as u8 + 1);
    ///             }
    ///             group.all_gather_buffer(&mut buffer, layout)?;
    ///             assert_eq!(buffer.as_slice::<u8>()?, [1, 2, 2, 2, 2, 1]);
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
    /// The errors of [`reduce_scatter_buffer`](Self::reduce_scatter_buffer).
    #[track_caller]
    pub fn all_gather_buffer(&self, buffer: &mut Buffer, layout: &Arc<ShardLayout>) -> Result<()> {
        let fingerprint = self.sharded(OpKind::AllGatherBuffer, buffer, layout)?;
        let operation = BufferOp::AllGather(Arc::clone(layout));
        self.run(&fingerprint, |ctx| ctx.run_buffer_op(&operation, buffer))
    }

    /// Starts an [`all_gather_buffer`](Self::all_gather_buffer) and returns at once, as
    /// [`start_all_reduce`](ProcessGroup::start_all_reduce) does. Ranks that call the blocking one at the same time
    /// take part in the same operation.
    ///
    /// # Errors
    ///
    /// The errors of [`start_reduce_scatter`](Self::start_reduce_scatter).
    #[track_caller]
    pub fn start_all_gather(&self, buffer: Buffer, layout: &Arc<ShardLayout>) -> Result<Pending> {
        let fingerprint = self.sharded(OpKind::AllGatherBuffer, &buffer, layout)?;
        let operation = BufferOp::AllGather(Arc::clone(layout));
        self.handle
            .start(fingerprint.with_purpose(self.purpose), buffer, operation)
    }
}

impl ProcessGroup {
    /// Returns the fingerprint of an operation by a shard layout; fails if the layout does not fit.
    #[track_caller]
    fn sharded(
        &self,
        kind: OpKind,
        buffer: &Buffer,
        layout: &ShardLayout,
    ) -> Result<CollectiveFingerprint> {
        let (found, expected) = (
            (layout.ranks(), layout.len()),
            (self.world_size(), buffer.len()),
        );
        if found != expected {
            return Err(Error::misuse(format!(
                "expected a layout of {} elements for {} ranks, found one of {} for {}; make it for the \
                     buffer and the world size",
                expected.1, expected.0, found.1, found.0
            )));
        }
        let fingerprint = CollectiveFingerprint::new(kind, self.site());
        Ok(fingerprint.with_data(buffer.dtype(), buffer.len()))
    }
}

/// Waits for the variables of this rank's place in a next group, and ignores a place that is not `wanted`.
fn told_place(
    group: &ProcessGroup,
    timeout: Duration,
    wanted: impl Fn(&[(String, String)]) -> bool,
) -> Result<Vec<(String, String)>> {
    let store = group.handle.rank_state.store.as_ref();
    let told = store.and_then(|store| store.next_place(timeout, wanted));
    told.ok_or_else(|| {
        Error::rendezvous(format!(
            "the launcher gave {} no place in a next group within {}",
            group.topology(),
            Seconds(timeout)
        ))
    })
}

/// Returns how ranks continue after a loss, if the launcher has told these variables for that.
fn of_loss(told: &[(String, String)]) -> Option<&str> {
    let found = told.iter().find(|(name, _)| name == ON_LOSS.name);
    found.map(|(_, value)| value.as_str())
}

/// Builds the launch of a rank that comes from the group `former`. The variables in `told` take precedence over the
/// environment.
fn launch_at(told: Vec<(String, String)>, former: &ProcessGroup) -> Result<Launch> {
    let told: BTreeMap<String, String> = told.into_iter().collect();
    let mut launch = Launch::from_vars(|name| match told.get(name) {
        Some(value) => Some(value.clone()),
        None => Some(variable(name)?.to_string_lossy().into_owned()),
    })?;
    if let Some(store) = &former.handle.rank_state.store {
        launch.former_store = store.downgrade();
    }
    Ok(launch)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::GroupOptions;
    use crate::rendezvous::{StoreServer, Token};

    const SOON: Duration = Duration::from_secs(10);

    /// A launch as a launcher describes it to a process.
    fn launch(store: &StoreServer, rank: usize, size: usize, elastic: &str) -> Launch {
        let told: BTreeMap<_, _> = variables(store, rank, size, elastic).into_iter().collect();
        Launch::from_vars(|name| told.get(name).cloned()).unwrap()
    }

    fn variables(
        store: &StoreServer,
        rank: usize,
        size: usize,
        elastic: &str,
    ) -> Vec<(String, String)> {
        let told = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("ACCEL_PORT", store.local_addr().port().to_string()),
            ("ACCEL_STORE", "launcher".to_owned()),
            ("ACCEL_TRANSPORT", "tcp".to_owned()),
            ("ACCEL_ELASTIC", elastic.to_owned()),
        ];
        let told = told.map(|(name, value)| (name.to_owned(), value));
        told.to_vec()
    }

    fn store(size: usize) -> StoreServer {
        StoreServer::bind(("127.0.0.1", 0), size, None::<Token>).unwrap()
    }

    fn sum(group: &ProcessGroup) -> f64 {
        let mut sum = [1.0];
        group.all_reduce(&mut sum, crate::ReduceOp::Sum).unwrap();
        sum[0]
    }

    fn connect(launch: &Launch) -> ProcessGroup {
        let options = GroupOptions::new().with_connect_timeout(SOON);
        ProcessGroup::connect(launch, &options).unwrap()
    }

    fn next(group: &ProcessGroup) -> Option<ProcessGroup> {
        group.close().unwrap();
        match group.next_place(SOON).unwrap() {
            NextPlace::Join(launch) => Some(connect(&launch)),
            NextPlace::Leave => None,
        }
    }

    #[test]
    fn a_place_that_is_told_before_the_ranks_have_met_waits_for_them() {
        let [first, second] = [store(2), store(1)];
        first.tell_next_place(0, variables(&second, 0, 1, "running"));
        first.tell_next_place(1, []);
        thread::scope(|scope| {
            for rank in 0..2 {
                let launch = launch(&first, rank, 2, "running");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 2.0);
                    assert_eq!(next(&group).is_some(), rank == 0);
                });
            }
        });
    }

    /// If a group loses another rank before it is complete, the launcher replaces it and closes its store. A survivor
    /// may not have reached that store yet, or may already be waiting there for the others.
    #[test]
    fn a_newer_place_makes_a_survivor_leave_an_incomplete_group() {
        let survivor_of = |store: &StoreServer, size| {
            let on_loss = (ON_LOSS.name.to_owned(), SURVIVOR.to_owned());
            let mut told = variables(store, 0, size, "running");
            told.push(on_loss);
            told
        };
        for has_store in [true, false] {
            let [first, second, third] = [store(1), store(2), store(1)];
            let group = connect(&launch(&first, 0, 1, "running"));
            let mut told = survivor_of(&second, 2);
            if !has_store {
                // Nobody listens at this port.
                let port = told.iter_mut().find(|(name, _)| name == "ACCEL_PORT");
                port.unwrap().1 = "1".to_owned();
            }
            first.tell_next_place(0, told);
            let place = group.survivors_place(SOON).unwrap();
            let (sender, outcome) = mpsc::channel();
            thread::spawn(move || {
                let group = ProcessGroup::connect(&place, &GroupOptions::new());
                // The receiver is gone only if the test has failed already.
                let _ = sender.send(group.map(drop));
            });
            thread::sleep(Duration::from_millis(200));
            first.tell_next_place(0, survivor_of(&third, 1));
            let error = outcome.recv_timeout(SOON).unwrap().unwrap_err();
            assert!(error.is_rendezvous(), "{error}");
            let text = error.to_string();
            assert!(text.contains("has given up the group"), "{text}");
            let place = group.survivors_place(SOON).unwrap();
            assert_eq!(sum(&connect(&place)), 1.0);
        }
    }

    #[test]
    fn one_process_becomes_three_and_then_two() {
        let [first, second, third] = [store(1), store(3), store(2)];
        thread::scope(|scope| {
            for rank in 1..3 {
                let launch = launch(&second, rank, 3, "joining");
                scope.spawn(move || {
                    let group = connect(&launch);
                    assert_eq!(sum(&group), 3.0);
                    let group = next(&group);
                    assert_eq!(group.is_some(), rank == 2, "rank 1 leaves");
                    if let Some(group) = group {
                        assert_eq!((group.rank(), sum(&group)), (1, 2.0));
                    }
                });
            }
            let alone = connect(&launch(&first, 0, 1, "running"));
            assert_eq!(sum(&alone), 1.0);
            assert!(!alone.has_next_place());
            first.tell_next_place(0, variables(&second, 0, 3, "running"));
            let group = next(&alone).unwrap();
            assert_eq!(sum(&group), 3.0);
            second.tell_next_place(0, variables(&third, 0, 2, "running"));
            second.tell_next_place(1, []);
            second.tell_next_place(2, variables(&third, 1, 2, "running"));
            assert_eq!(sum(&next(&group).unwrap()), 2.0);
        });
    }
}
