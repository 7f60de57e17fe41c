//! Operations on a buffer, which can be started and run in flight.

use std::sync::Arc;

use super::{OpContext, OpProgress, gather::Gathering, reduce::Reduction};
use crate::{
    buffer::Buffer,
    element::{DType, ReduceOp},
    error::Result,
    shard_layout::ShardLayout,
};

/// An operation on a buffer, in place.
#[derive(Clone, Debug)]
pub(crate) enum BufferOp {
    /// Every rank gets the reduction.
    AllReduce(ReduceOp),
    /// Every rank gets its shard of the reduction.
    ReduceScatter(ReduceOp, Arc<ShardLayout>),
    /// Every rank gets the shards of all ranks.
    AllGather(Arc<ShardLayout>),
}

impl BufferOp {
    /// Begins the operation over connections, on a buffer of `len` bytes.
    pub(crate) fn begin(&self, dtype: DType, len: usize, world_size: usize) -> ResumableOp {
        match self {
            Self::AllReduce(op) => {
                ResumableOp::Reduction(Reduction::new(dtype, *op, None, len, world_size))
            }
            Self::ReduceScatter(op, shards) => {
                ResumableOp::Reduction(Reduction::new(dtype, *op, Some(shards), len, world_size))
            }
            Self::AllGather(shards) => ResumableOp::Gathering(Gathering::new(dtype, shards)),
        }
    }
}

/// An operation over connections that can stop wherever it waits for others, and continue later.
#[derive(Debug)]
pub(crate) enum ResumableOp {
    Reduction(Reduction),
    Gathering(Gathering),
}

impl ResumableOp {
    /// Advances as far as possible. Every call must pass the same buffer.
    pub(crate) fn advance(
        &mut self,
        ctx: &mut OpContext<'_>,
        bytes: &mut [u8],
    ) -> Result<OpProgress> {
        match self {
            Self::Reduction(reduction) => reduction.advance(ctx, bytes),
            Self::Gathering(gathering) => gathering.advance(ctx, bytes),
        }
    }
}

impl OpContext<'_> {
    /// Runs an operation on a buffer from beginning to end; in place where it lies if the ranks share memory.
    pub(crate) fn run_buffer_op(mut self, op: &BufferOp, buffer: &mut Buffer) -> Result<()> {
        let alone = self.world_size == 1;
        if let Some(shm) = self.shm_op() {
            return match op {
                BufferOp::AllReduce(op) => shm.all_reduce_buffer(*op, buffer),
                // There is nothing to compare, and nothing to send.
                BufferOp::ReduceScatter(op, _) if alone => shm.all_reduce_buffer(*op, buffer),
                BufferOp::ReduceScatter(op, shards) => {
                    shm.reduce_scatter_buffer(*op, buffer, shards)
                }
                BufferOp::AllGather(shards) => shm.all_gather_buffer(buffer, shards),
            };
        }
        let (dtype, bytes) = (buffer.dtype(), buffer.bytes_mut());
        if let Some(hosts) = self.transport.hosts() {
            let reduction = match op {
                BufferOp::AllReduce(op) => Some((*op, None)),
                BufferOp::ReduceScatter(op, shards) => Some((*op, Some(&**shards))),
                BufferOp::AllGather(_) => None,
            };
            if let Some((op, shards)) = reduction
                && Self::is_hierarchical(dtype, op)
            {
                return self.all_reduce_hierarchical(hosts, dtype, op, bytes, shards);
            }
        }
        let mut running = op.begin(dtype, bytes.len(), self.world_size);
        let progress = running.advance(&mut self, bytes)?;
        self.completed(progress)
    }
}
