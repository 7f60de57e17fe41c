//! NCCL's communicator, which is used by one thread at a time and given back once.

#![expect(unsafe_code, reason = "a handle of NCCL's is made and given back here")]

use crate::api::{self, CallResult, Operation, Progress, UniqueId};
use crate::gpu::{DevicePointer, Gpu, Stream};

/// A communicator that NCCL knows. Whoever has it, has it alone: methods that use it need `&mut`, and
/// those that give it back take it.
#[derive(Debug)]
pub(super) struct Link {
    gpu: Gpu,
    handle: api::Comm,
}

impl Link {
    /// Begins to connect a rank; [`progress`](Self::progress) tells when it is.
    pub(super) fn begin(gpu: &Gpu, id: &UniqueId, rank: i32, world_size: i32) -> CallResult<Self> {
        // SAFETY: the context, whose device is meant, is current.
        let handle = gpu.inside(|api| unsafe { api.connect(id.to_bytes(), rank, world_size) })?;
        Ok(Self {
            gpu: gpu.clone(),
            handle,
        })
    }

    /// Returns the progress of the last call, or what has failed since.
    pub(super) fn progress(&mut self) -> CallResult<Progress> {
        // SAFETY: the handle is whole, since nothing has taken `self`, and `&mut` keeps others away.
        self.gpu.inside(|api| unsafe { api.progress(self.handle) })
    }

    /// Enqueues a reduction in place.
    ///
    /// # Safety
    /// The memory holds so many elements, on the GPU of this link, until the stream has come past the
    /// operation or the link is given back; nothing else uses it meanwhile.
    pub(super) unsafe fn all_reduce(
        &mut self,
        stream: &Stream,
        at: DevicePointer,
        elements: usize,
        operation: Operation,
    ) -> CallResult<Progress> {
        let (comm, stream) = (self.handle, stream.handle());
        self.gpu.inside(|api| {
            // SAFETY: as for `progress`, and the memory by this method's own condition. The stream is of this
            // context: both are made in `Communicator::connect`.
            unsafe { api.all_reduce(comm, stream, at.0, elements, operation) }
        })
    }

    /// Begins to end in good order, with the other ranks.
    pub(super) fn finalize(&mut self) -> CallResult<Progress> {
        // SAFETY: as for `progress`.
        self.gpu.inside(|api| unsafe { api.finalize(self.handle) })
    }

    /// Gives back what was finalized.
    pub(super) fn destroy(self) -> CallResult<()> {
        // SAFETY: as for `progress`; `self` ends here.
        self.gpu.inside(|api| unsafe { api.destroy(self.handle) })
    }

    /// Ends at once what runs and what waits, in kernels and in threads of NCCL's, and gives it back.
    pub(super) fn abort(self) -> CallResult<()> {
        // SAFETY: as for `progress`; `self` ends here.
        self.gpu.inside(|api| unsafe { api.abort(self.handle) })
    }
}
