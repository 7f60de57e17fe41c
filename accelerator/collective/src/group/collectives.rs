//! Operations that all ranks of a group call.

use super::ProcessGroup;
use crate::{
    buffer::Buffer,
    buffer_slice::{BufferSlice, GatherLayout},
    element::{DType, Element},
    error::Result,
    fingerprint::{CollectiveFingerprint, OpKind},
    partition::Partition,
    reduce_op::ReduceOp,
};

impl ProcessGroup {
    /// Reduces the values of all ranks, element by element, in place.
    ///
    /// [`ReduceOp`] says how elements are combined.
    ///
    /// # Errors
    ///
    /// - a mismatch error, with the same text on every rank, if the ranks call different
    ///   operations or pass different lengths, element types or reductions;
    /// - a peer-lost error that names the rank that is gone;
    /// - a timeout error that names the ranks that did not come within the progress timeout;
    /// - a misuse error if collectives are [forbidden](Self::forbid), a closed error after
    ///   [`close`](Self::close).
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllReduce, self.site())
            .with_op(op)
            .with_data(T::DTYPE, values.len());
        self.run(&fingerprint, |ctx| {
            ctx.all_reduce(T::DTYPE, op, bytemuck::cast_slice_mut(values))
        })
    }

    /// Gives every rank the root's values.
    ///
    /// # Errors
    ///
    /// A misuse error if the root is no rank; otherwise as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        let fingerprint = CollectiveFingerprint::new(OpKind::Broadcast, self.site())
            .with_data(T::DTYPE, values.len())
            .with_root(root);
        self.run(&fingerprint, |ctx| {
            ctx.broadcast(root, bytemuck::cast_slice_mut(values))
        })
    }

    /// Gives every rank the values of all ranks, one after the other in rank order. All ranks
    /// pass equally many.
    ///
    /// # Errors
    ///
    /// The same as for [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, values: &[T]) -> Result<Vec<T>> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllGather, self.site())
            .with_data(T::DTYPE, values.len());
        let len = values.len();
        let mut all = vec![T::zeroed(); len * self.world_size()];
        all[self.rank() * len..][..len].copy_from_slice(values);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut all);
        let part = size_of_val(values);
        let mut next: Vec<usize> = (0..self.world_size()).map(|rank| rank * part).collect();
        self.run(&fingerprint, |ctx| {
            ctx.gather(
                bytemuck::cast_slice(values),
                |_, _| true,
                |rank, piece| {
                    bytes[next[rank]..][..piece.len()].copy_from_slice(piece);
                    next[rank] += piece.len();
                },
            )
        })?;
        Ok(all)
    }

    /// Gives every rank the values of each rank. Ranks may pass different numbers of values.
    ///
    /// # Errors
    ///
    /// The same as for [`all_reduce`](Self::all_reduce), except that lengths may differ.
    #[track_caller]
    pub fn all_gather_varied<T: Element>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllGatherVaried, self.site())
            .with_data(T::DTYPE, values.len());
        let mut all = vec![Vec::new(); self.world_size()];
        all[self.rank()].extend_from_slice(values);
        self.run(&fingerprint, |ctx| {
            // A piece is a whole number of elements, aligned to a cache line.
            ctx.gather(
                bytemuck::cast_slice(values),
                |_, _| true,
                |rank, piece| {
                    all[rank].extend_from_slice(bytemuck::cast_slice(piece));
                },
            )
        })?;
        Ok(all)
    }

    /// Gathers as [`all_gather_varied`](Self::all_gather_varied) does, into memory of the caller: `sink` gets the
    /// values of each other rank with its number, piece by piece and in order for each rank. The
    /// rank's own values are not given back.
    ///
    /// # Errors
    ///
    /// The same as for [`all_gather_varied`](Self::all_gather_varied).
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

    /// Shows every rank parts of the buffers of all ranks: `sink` gets each part with its rank and its
    /// number among the parts of that rank, its own ones too. All ranks pass buffers of the same
    /// lengths, and the same `parts`, by rank, of which those of different ranks must not overlap.
    ///
    /// If ranks share memory, they see the parts where they lie, without a copy. What a rank has in its
    /// own buffers of the parts of others is unspecified then and after errors.
    ///
    /// `sink` is called for everything or not at all, also if an error is returned: it is called when
    /// all parts of all ranks are there.
    ///
    /// ```
    /// use std::thread;
    ///
    /// use accelerator_collective::{DType, GroupOptions, BufferSlice, ProcessGroup};
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
    /// A misuse error if parts do not lie within the buffers, or are not those of as many ranks as
    /// there are; a mismatch error if ranks pass other parts; otherwise as
    /// [`all_reduce`](Self::all_reduce).
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

    /// Reduces the values of all ranks and gives rank `r` the `r`-th part of the result, as
    /// [`Partition`] cuts it.
    ///
    /// # Errors
    ///
    /// The same as for [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, values: &[T], op: ReduceOp) -> Result<Vec<T>> {
        let fingerprint = CollectiveFingerprint::new(OpKind::ReduceScatter, self.site())
            .with_op(op)
            .with_data(T::DTYPE, values.len());
        let part = Partition::new(values.len(), self.world_size()).range(self.rank());
        let mut own = values[part].to_vec();
        self.run(&fingerprint, |ctx| {
            ctx.reduce_scatter(
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
    /// The same as for [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let fingerprint = CollectiveFingerprint::new(OpKind::Barrier, self.site());
        self.run(&fingerprint, |ctx| ctx.barrier())
    }
}
