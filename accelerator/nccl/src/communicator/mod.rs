//! Ranks that reduce together.

mod group;
mod link;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accelerator_collective::{DType, ReduceOp};
use accelerator_host::sync::Mutex;

use self::link::Link;
use crate::api::{CallResult, Operation, Progress, UniqueId};
use crate::error::{Error, Kind, Result};
use crate::gpu::{DeviceMemory, DevicePointer, Gpu, Ordering};
use state::{
    ABORTING, CallerHandle, CommTimeouts, CommunicatorInner, FailureDetector, Notify, Phase, Work,
    after,
};

/// This rank's end of a group of GPUs that reduce together, by NCCL.
///
/// Operations run on a stream of the communicator's own, one after the other, alongside the GPU's other
/// work. Each begins after all that was enqueued in the context before it. Nothing that is enqueued
/// after it waits for it, until [`order_after`](Self::order_after) says so.
///
/// While operations are under way, a thread asks the group every 20 ms whether it has ended, and NCCL
/// whether something failed. In either case it aborts NCCL's communicator, which ends kernels that wait
/// for a peer; from then on every call returns an error with that reason
/// ([`is_aborted`](Error::is_aborted)). There is no way back: ranks that are left make another
/// communicator, with another id.
///
/// All ranks call the same operations in the same order, and if a process has several communicators on a
/// GPU, those of all of them: each operation begins after what the context held, other communicators'
/// included. Hence two ranks of one communicator cannot share a context either. Calls of several threads of a rank are
/// safe, and take turns, but then nothing says in which order.
///
/// Dropping it waits for operations under way and ends in good order with the peers, for 5 seconds at
/// most; then, and once the group has ended, it aborts. It does not wait for longer than some
/// seconds.
///
/// ```no_run
/// use std::time::Duration;
///
/// use accelerator_collective::{DType, ProcessGroup, ReduceOp};
/// use accelerator_nccl::{Communicator, DevicePointer, Gpu};
///
/// # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
/// /// Averages the gradients of all ranks, each bucket 1024 values on this GPU, such as tensors of CubeCL's.
/// fn reduce(gpu: &Gpu, group: &ProcessGroup, buckets: &[DevicePointer]) -> Result<()> {
///     let ranks = Communicator::connect_group(gpu, group, Duration::from_secs(60))??;
///     for bucket in buckets {
///         // SAFETY: a bucket holds 1024 values, and lives until `wait` has returned.
///         unsafe { ranks.all_reduce(*bucket, 1024, DType::F32, ReduceOp::Mean)? };
///         if ranks.is_done()? {
///             println!("that was quick");
///         }
///     }
///     // Kernels and copies that are enqueued from here on see the averages.
///     ranks.order_after()?;
///     ranks.wait()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Communicator {
    inner: Arc<CommunicatorInner>,
    /// One operation is enqueued at a time.
    turn: Mutex<()>,
    watching: Option<JoinHandle<()>>,
}

impl Communicator {
    /// Enqueues a reduction of all ranks' elements at that place, in place: after it, every rank has the
    /// result there.
    ///
    /// It begins after everything that is enqueued in the context at the time of this call, and the
    /// host does not wait for that; with a driver older than CUDA 12.5, it does. It returns when
    /// NCCL has enqueued the operation, which takes some ten microseconds, and more for the first one
    /// of a communicator, when ranks make connections. When it has ended is told by
    /// [`is_done`](Self::is_done), [`wait`](Self::wait) or [`order_after`](Self::order_after).
    ///
    /// The order in which values are added is NCCL's (see the README of this crate). Sums of `f16` and `bf16` are rounded after each addition. For a mean, floating-point values are
    /// divided before they are added, integers after.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) for elements of a type that NCCL does not reduce, as the message lists them,
    /// [`is_aborted`](Error::is_aborted) if the communicator has ended, with the reason. A failure of this very call ends it as well, and is
    /// told to the group: the others have an operation that this rank has not.
    ///
    /// # Safety
    /// - At that place, on the GPU of this communicator, are `elements` elements of that type.
    /// - From this call on until the operation has ended, nothing reads, writes or frees them but what was
    ///   enqueued in the context before this call, or is enqueued after
    ///   [`order_after`](Self::order_after) has returned `Ok`. It has ended when [`wait`](Self::wait) or
    ///   the drop of the communicator has returned, or [`is_done`](Self::is_done) has returned `true`.
    #[expect(unsafe_code, reason = "whose memory it is, only the caller knows")]
    pub unsafe fn all_reduce(
        &self,
        at: DevicePointer,
        elements: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let operation = Operation::new(dtype, op)?;
        // SAFETY: the caller's conditions are these.
        unsafe { self.enqueue(at, elements, operation) }
    }

    /// Runs [`all_reduce`](Self::all_reduce) for an operation that NCCL is known to have.
    ///
    /// # Safety
    /// The same as for [`all_reduce`](Self::all_reduce).
    #[expect(unsafe_code, reason = "whose memory it is, only the caller knows")]
    unsafe fn enqueue(
        &self,
        at: DevicePointer,
        elements: usize,
        operation: Operation,
    ) -> Result<()> {
        let inner = &*self.inner;
        let _turn = self.turn.lock();
        let mut state = inner.ready()?;
        let before = std::mem::replace(&mut state.work, Work::Enqueuing);
        drop(state);
        if before == Work::None {
            // The watching thread was at rest.
            inner.notify();
        }
        let ending = |fault| inner.end_by(&fault);
        self.after_the_context().map_err(ending)?;

        let mut state = inner.ready()?;
        let progress = match &mut state.link {
            // SAFETY: the caller's conditions are these.
            Some(link) => unsafe { link.all_reduce(&inner.stream, at, elements, operation) },
            None => Ok(Progress::Done),
        };
        drop(state);
        self.enqueued(progress)?;

        let mut state = inner.ready()?;
        match inner.done.record(&inner.stream) {
            Ok(()) => {
                state.work = Work::Enqueued;
                Ok(())
            }
            Err(fault) => {
                drop(state);
                Err(ending(fault))
            }
        }
    }

    /// Reduces all that is in that memory, in place, as often as asked, one after the other, and waits for
    /// the last. It begins after what is enqueued in the context before.
    ///
    /// # Errors
    /// [`is_misuse`](Error::is_misuse) for memory of another GPU, or that holds no whole number of
    /// elements; otherwise as [`all_reduce`](Self::all_reduce) and [`wait`](Self::wait). After those the
    /// memory holds anything, and is not freed.
    #[expect(
        unsafe_code,
        reason = "an operation on memory that is borrowed until it has ended"
    )]
    #[doc(hidden)]
    pub fn all_reduce_memory(
        &self,
        memory: &mut DeviceMemory,
        dtype: DType,
        op: ReduceOp,
        times: usize,
    ) -> Result<()> {
        if !memory.gpu().is(&self.inner.gpu) {
            let (theirs, ours) = (memory.gpu().bus_id(), self.inner.gpu.bus_id());
            return Err(Error::misuse(format!(
                "memory of GPU {theirs} was given to a communicator of GPU {ours}"
            )));
        }
        let operation = Operation::new(dtype, op)?;
        let (bytes, element) = (memory.bytes(), dtype.size());
        if !bytes.is_multiple_of(element) {
            return Err(Error::misuse(format!(
                "{bytes} bytes are no whole number of {dtype}, which takes {element}"
            )));
        }
        let (at, elements) = (memory.pointer(), bytes / element);
        let reduced = (0..times)
            // SAFETY: the memory holds so many elements, on this GPU. It is borrowed until all operations
            // have ended; where one fails, it is never freed.
            .try_for_each(|_| unsafe { self.enqueue(at, elements, operation) })
            .and_then(|()| self.wait());
        if reduced.is_err() {
            memory.forfeit();
        }
        reduced
    }

    /// Lets everything that is enqueued in the context from now on wait for the operations so far.
    ///
    /// To be called when results are about to be read, by kernels or by copies, and not right after each
    /// [`all_reduce`](Self::all_reduce): all later work of the context waits, the rest of a backward
    /// pass as well, and nothing would overlap. The host does not wait; with a driver older than CUDA
    /// 12.5, it does, as in [`wait`](Self::wait).
    ///
    /// What waits so on the GPU is freed by an abort as well, and then works on what is no result: where
    /// that matters, look at [`is_done`](Self::is_done) or [`wait`](Self::wait) before it is kept.
    ///
    /// # Errors
    /// [`is_aborted`](Error::is_aborted) if the communicator has ended, with the reason.
    pub fn order_after(&self) -> Result<()> {
        let inner = &*self.inner;
        if inner.gpu.ordering() == Ordering::Host {
            return self.wait();
        }
        let _turn = self.turn.lock();
        let state = inner.ready()?;
        if state.work == Work::None {
            return Ok(());
        }
        let held = inner.done.hold_context();
        drop(state);
        held.map_err(|fault| inner.end_by(&fault))
    }

    /// Returns `true` if all operations so far have ended.
    ///
    /// # Errors
    /// [`is_aborted`](Error::is_aborted) if the communicator has ended, with the reason.
    pub fn is_done(&self) -> Result<bool> {
        self.inner.is_done()
    }

    /// Waits, on the host, until all operations so far have ended.
    ///
    /// # Errors
    /// [`is_aborted`](Error::is_aborted) if the communicator has ended, before or meanwhile, with the
    /// reason. NCCL has let go of all memory then, or has failed to for 10 seconds.
    pub fn wait(&self) -> Result<()> {
        let began = Instant::now();
        while !self.is_done()? {
            relax(began);
        }
        Ok(())
    }

    /// Connects this rank with all others by that id.
    fn connect(
        gpu: &Gpu,
        id: &UniqueId,
        (rank, world_size): (usize, usize),
        detector: Arc<dyn FailureDetector>,
        timeouts: CommTimeouts,
    ) -> Result<Self> {
        let began = Instant::now();
        let (Some(number), Some(count)) = (
            i32::try_from(rank).ok().filter(|_| rank < world_size),
            i32::try_from(world_size).ok(),
        ) else {
            return Err(Error::misuse(format!(
                "rank {rank} is not in a world of {world_size} ranks"
            )));
        };
        let who = format!("rank {rank} of {world_size}");
        let inner = Arc::new(CommunicatorInner::new(gpu, detector, timeouts, who)?);
        let watching = state::start_watchdog(&inner).map_err(|error| {
            let message = "the thread that watches over a communicator could not be started";
            Error::new(Kind::Nccl, message).with_source(error)
        })?;
        let communicator = Self {
            inner,
            turn: Mutex::new(()),
            watching: Some(watching),
        };
        communicator.connected(gpu, id, (number, count), began)?;
        Ok(communicator)
    }

    /// Begins to connect, and waits for the watching thread to see it done.
    fn connected(
        &self,
        gpu: &Gpu,
        id: &UniqueId,
        (rank, world_size): (i32, i32),
        began: Instant,
    ) -> Result<()> {
        let inner = &*self.inner;
        let deadline = inner.timeouts.connecting;
        match Link::begin(gpu, id, rank, world_size) {
            Ok(link) => inner.lock().link = Some(link),
            Err(fault) => return Err(inner.end(Error::from(fault), Notify::Group)),
        }
        inner.notify();
        let until = after(began, deadline);
        let connecting = |state: &state::CommState| matches!(state.phase, Phase::Connecting);
        let state = inner.pause_until(inner.lock(), until, connecting);
        let late = connecting(&state);
        drop(state);
        if late {
            let message = format!(
                "not all of the {world_size} ranks came together within {} s by NCCL, as rank {rank} saw it: see \
                 whether each has reached this point, with a GPU of its own, and whether hosts can reach one \
                 another (NCCL_SOCKET_IFNAME names the interface; NCCL_DEBUG=INFO says more)",
                deadline.as_secs_f64()
            );
            return Err(inner.end(Error::new(Kind::Timeout, message), Notify::Group));
        }
        inner.ready().map(drop)
    }

    /// Lets the next operation wait for what is in the context.
    fn after_the_context(&self) -> CallResult<()> {
        let inner = &*self.inner;
        match inner.gpu.ordering() {
            Ordering::Events => {
                inner.before.record_context()?;
                inner.stream.wait(&inner.before)
            }
            Ordering::Host => inner.gpu.synchronize(),
        }
    }

    /// Waits until NCCL has enqueued an operation: until then, the stream does not have it.
    fn enqueued(&self, mut progress: CallResult<Progress>) -> Result<()> {
        let inner = &*self.inner;
        let began = Instant::now();
        loop {
            match progress {
                Ok(Progress::Done) => return Ok(()),
                Ok(Progress::UnderWay) => {}
                Err(fault) => return Err(inner.end_by(&fault)),
            }
            relax(began);
            let mut state = inner.ready()?;
            progress = match &mut state.link {
                Some(link) => link.progress(),
                None => Ok(Progress::Done),
            };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let inner = &*self.inner;
        let mut state = inner.lock();
        state.owner = CallerHandle::Dropped;
        inner.notify();
        let timeouts = inner.timeouts.closing.saturating_add(ABORTING);
        let runs =
            |state: &state::CommState| !matches!(state.phase, Phase::Ended(_) | Phase::Closed);
        let state = inner.pause_until(state, after(Instant::now(), timeouts), runs);
        let ended = !runs(&state);
        drop(state);
        match self.watching.take() {
            // It ends right after it has said so, and cannot panic.
            Some(watching) if ended => drop(watching.join()),
            _ => tracing::warn!(
                "NCCL does not end the communicator of {}; it is left to itself",
                inner.who
            ),
        }
    }
}

/// Passes a moment: on the core at first, since NCCL enqueues within some microseconds; later others run.
fn relax(began: Instant) {
    match began.elapsed() {
        waited if waited < EAGER => std::hint::spin_loop(),
        waited if waited < LIVELY => thread::yield_now(),
        _ => thread::sleep(Duration::from_micros(50)),
    }
}

/// The time that peers have to end together.
const CLOSING: Duration = Duration::from_secs(5);

/// The time for which a wait keeps its core.
const EAGER: Duration = Duration::from_micros(50);

/// The time until which it only lets others run.
const LIVELY: Duration = Duration::from_millis(1);
