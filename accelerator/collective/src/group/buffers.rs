//! Reductions of buffers, blocking and started.

use std::sync::Arc;

use super::{Pending, ProcessGroup, engine::Output};
use crate::{
    buffer::Buffer,
    error::{Error, Kind, Result},
    fingerprint::{CollectiveFingerprint, OpKind},
    reduce_op::ReduceOp,
    shard_layout::ShardLayout,
};

impl ProcessGroup {
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
    /// Fails at once if the operation is not admitted or the communication thread cannot be
    /// started; otherwise from [`Pending::wait`], as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn start_all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllReduce, self.site())
            .with_op(op)
            .with_data(buffer.dtype(), buffer.len())
            .with_purpose(self.1);
        self.0.start(fingerprint, buffer, op, Output::Full)
    }

    /// Reduces the values of all ranks, element by element, in place and without a copy where the
    /// buffer lies in the transport's memory; see [`buffer`](Self::buffer).
    ///
    /// It runs on the calling thread. Ranks that pass slices to [`all_reduce`](Self::all_reduce)
    /// at the same time take part in the same operation.
    ///
    /// # Errors
    ///
    /// The same as for [`all_reduce`](Self::all_reduce). The buffer's contents are then unspecified.
    #[track_caller]
    pub fn all_reduce_buffer(&self, buffer: &mut Buffer, op: ReduceOp) -> Result<()> {
        let fingerprint = CollectiveFingerprint::new(OpKind::AllReduce, self.site())
            .with_op(op)
            .with_data(buffer.dtype(), buffer.len());
        self.run(&fingerprint, |ctx| {
            ctx.reduce_buffer(op, &Output::Full, buffer)
        })
    }

    /// Reduces the values of all ranks, element by element, in place, and only those that this rank
    /// keeps by the `layout`: afterwards they have the bits that
    /// [`all_reduce_buffer`](Self::all_reduce_buffer) would give them. All others are unspecified.
    ///
    /// All ranks pass buffers of the same length, and the same layout. Where they share memory, what a
    /// rank keeps is reduced where it lies and written once; over connections no results travel, which
    /// is half of what an all-reduce sends. Over [several hosts](crate::TransportKind::Hierarchical)
    /// everything is reduced as by an all-reduce, so that a link carries no more.
    ///
    /// ```
    /// use std::{sync::Arc, thread};
    ///
    /// use accelerator_collective::{ShardLayout, DType, GroupOptions, ProcessGroup, ReduceOp};
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
    /// A misuse error if the layout is one of another number of ranks, or of a buffer of another
    /// length; a mismatch error, with the same text on every rank, if ranks pass other layouts;
    /// otherwise as [`all_reduce`](Self::all_reduce). The buffer's contents are then unspecified.
    #[track_caller]
    pub fn reduce_scatter_buffer(
        &self,
        buffer: &mut Buffer,
        op: ReduceOp,
        layout: &Arc<ShardLayout>,
    ) -> Result<()> {
        let fingerprint = self.scattering(buffer, op, layout)?;
        let output = Output::Shard(Arc::clone(layout));
        self.run(&fingerprint, |ctx| ctx.reduce_buffer(op, &output, buffer))
    }

    /// Starts a [`reduce_scatter_buffer`](Self::reduce_scatter_buffer) and returns at once, as
    /// [`start_all_reduce`](Self::start_all_reduce) does. Ranks that call the blocking one at the
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
        let fingerprint = self.scattering(&buffer, op, layout)?;
        let output = Output::Shard(Arc::clone(layout));
        self.0
            .start(fingerprint.with_purpose(self.1), buffer, op, output)
    }

    /// The fingerprint of a reduction by a shard layout, which must fit.
    #[track_caller]
    fn scattering(
        &self,
        buffer: &Buffer,
        op: ReduceOp,
        layout: &ShardLayout,
    ) -> Result<CollectiveFingerprint> {
        let (found, expected) = (
            (layout.ranks(), layout.len()),
            (self.world_size(), buffer.len()),
        );
        if found != expected {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "expected a layout of {} elements for {} ranks, found one of {} for {}; make it for the \
                     buffer and the world size",
                    expected.1, expected.0, found.1, found.0
                ),
            ));
        }
        let fingerprint = CollectiveFingerprint::new(OpKind::ReduceScatterBuffer, self.site());
        Ok(fingerprint
            .with_op(op)
            .with_data(buffer.dtype(), buffer.len()))
    }
}
