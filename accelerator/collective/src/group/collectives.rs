//! Operations that all ranks of a group call: on slices, on buffers, and on values that serde can write.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::engine::{BufferOp, scatter_len};
use super::{Pending, ProcessGroup};
use crate::buffer::Buffer;
use crate::element::{DType, Element, ReduceOp};
use crate::error::{Error, Kind, Result};
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};
use crate::shard_layout::Partition;

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
    /// - a misuse error if collectives are forbidden on this rank, a closed error after
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
        let mut all = vec![Vec::new(); self.world_size()];
        all[self.rank()].extend_from_slice(values);
        self.all_gather_varied_with(values, |rank, piece| all[rank].extend_from_slice(piece))?;
        Ok(all)
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
            .with_purpose(self.purpose);
        self.handle
            .start(fingerprint, buffer, BufferOp::AllReduce(op))
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
            ctx.run_buffer_op(&BufferOp::AllReduce(op), buffer)
        })
    }
}

/// Objects travel as CBOR, which keeps what serde describes (NaN and maps with any keys
/// included) and lets the receiver's type differ if the format allows it.
impl ProcessGroup {
    /// Gives every rank the values of all ranks, in rank order.
    ///
    /// # Errors
    ///
    /// A misuse error if the value cannot be written or read as `S`; otherwise as
    /// [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather_object<S: Serialize + DeserializeOwned>(&self, value: &S) -> Result<Vec<S>> {
        let site = self.site();
        let own = write(value, site)?;
        let fingerprint = CollectiveFingerprint::new(OpKind::AllGatherObject, site)
            .with_data(DType::U8, own.len());
        let all = self.gather_bytes(&fingerprint, own, |_, _| true)?;
        read_all(&all, site)
    }

    /// Gives the root the values of all ranks, in rank order, and the other ranks `None`.
    ///
    /// # Errors
    ///
    /// The same as for [`all_gather_object`](Self::all_gather_object).
    #[track_caller]
    pub fn gather_object<S: Serialize + DeserializeOwned>(
        &self,
        value: &S,
        root: usize,
    ) -> Result<Option<Vec<S>>> {
        let site = self.site();
        let own = write(value, site)?;
        let fingerprint = CollectiveFingerprint::new(OpKind::GatherObject, site)
            .with_data(DType::U8, own.len())
            .with_root(root);
        let all = self.gather_bytes(&fingerprint, own, |_, to| to == root)?;
        match self.rank() == root {
            true => read_all(&all, site).map(Some),
            false => Ok(None),
        }
    }

    /// Gives every rank the root's value. The root passes `Some`, what others pass is ignored.
    ///
    /// # Errors
    ///
    /// A misuse error if the root passes `None`; otherwise as
    /// [`all_gather_object`](Self::all_gather_object).
    #[track_caller]
    pub fn broadcast_object<S: Serialize + DeserializeOwned>(
        &self,
        value: Option<&S>,
        root: usize,
    ) -> Result<S> {
        let site = self.site();
        let mut own = Vec::new();
        if self.rank() == root {
            let Some(value) = value else {
                return Err(Error::misuse(format!(
                    "rank {root} is the root of broadcast_object at {site}, but passed no \
                         value"
                )));
            };
            own = write(value, site)?;
        }
        let fingerprint = CollectiveFingerprint::new(OpKind::BroadcastObject, site)
            .with_root(root)
            .with_data(DType::U8, own.len());
        let all = self.gather_bytes(&fingerprint, own, |from, _| from == root)?;
        read(&all[root], root, site)
    }

    /// Gives each rank its value of those that the root has, one for each rank in rank order. The root
    /// passes `Some`, what others pass is ignored. Over connections each rank is sent its own value
    /// only.
    ///
    /// # Errors
    ///
    /// A misuse error if the root passes `None` or not one value for each rank, or a value cannot be
    /// written, or read as `T`; otherwise as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn scatter_object<S: Serialize, T: DeserializeOwned>(
        &self,
        values: Option<&[S]>,
        root: usize,
    ) -> Result<T> {
        let site = self.site();
        let world_size = self.world_size();
        let mut parts = vec![Vec::new(); world_size];
        if self.rank() == root {
            let values = values.unwrap_or_default();
            if values.len() != world_size {
                return Err(Error::misuse(format!(
                    "rank {root} is the root of scatter_object at {site}, and passed {} values for \
                         {world_size} ranks; pass one for each",
                    values.len()
                )));
            }
            for (part, value) in parts.iter_mut().zip(values) {
                *part = write(value, site)?;
            }
        }
        let mut own = std::mem::take(&mut parts[self.rank()]);
        let fingerprint = CollectiveFingerprint::new(OpKind::ScatterObject, site)
            .with_root(root)
            .with_data(DType::U8, scatter_len(&parts));
        self.run(&fingerprint, |ctx| {
            ctx.scatter(root, &parts, |piece| own.extend_from_slice(piece))
        })?;
        read(&own, root, site)
    }
}

impl ProcessGroup {
    /// Returns the bytes of each rank that `goes` lets through to this one, and its own.
    fn gather_bytes(
        &self,
        fingerprint: &CollectiveFingerprint,
        own: Vec<u8>,
        goes: impl Fn(usize, usize) -> bool,
    ) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![Vec::new(); self.world_size()];
        self.run(fingerprint, |ctx| {
            ctx.gather(&own, goes, |rank, piece| all[rank].extend_from_slice(piece))
        })?;
        all[self.rank()] = own;
        Ok(all)
    }
}

fn write<S: Serialize>(value: &S, site: CallSite) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match ciborium::into_writer(value, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(Error::caused(
            Kind::Misuse,
            format!("the object given at {site} cannot be written"),
            error,
        )),
    }
}

fn read_all<S: DeserializeOwned>(all: &[Vec<u8>], site: CallSite) -> Result<Vec<S>> {
    all.iter()
        .enumerate()
        .map(|(rank, bytes)| read(bytes, rank, site))
        .collect()
}

fn read<S: DeserializeOwned>(bytes: &[u8], rank: usize, site: CallSite) -> Result<S> {
    ciborium::from_reader(bytes).map_err(|error| {
        Error::caused(
            Kind::Misuse,
            format!(
                "the object that rank {rank} sent cannot be read as {} at {site}; all ranks must \
                 pass the same type",
                std::any::type_name::<S>()
            ),
            error,
        )
    })
}
