//! Collectives of values that serde can write.

use serde::{Serialize, de::DeserializeOwned};

use super::{ProcessGroup, engine::scatter_len};
use crate::{
    element::DType,
    error::{Error, Kind, Result},
    fingerprint::{CallSite, CollectiveFingerprint, OpKind},
};

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
        let mut all = vec![Vec::new(); self.world_size()];
        self.run(&fingerprint, |ctx| {
            ctx.gather(
                &own,
                |_, _| true,
                |rank, piece| all[rank].extend_from_slice(piece),
            )
        })?;
        all[self.rank()] = own;
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
        let mut all = vec![Vec::new(); self.world_size()];
        self.run(&fingerprint, |ctx| {
            ctx.gather(
                &own,
                |_, to| to == root,
                |rank, piece| all[rank].extend_from_slice(piece),
            )
        })?;
        if self.rank() != root {
            return Ok(None);
        }
        all[root] = own;
        read_all(&all, site).map(Some)
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
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "rank {root} is the root of broadcast_object at {site}, but passed no \
                         value"
                    ),
                ));
            };
            own = write(value, site)?;
        }
        let fingerprint = CollectiveFingerprint::new(OpKind::BroadcastObject, site)
            .with_root(root)
            .with_data(DType::U8, own.len());
        let mut received = Vec::new();
        self.run(&fingerprint, |ctx| {
            ctx.gather(
                &own,
                |from, _| from == root,
                |_, piece| received.extend_from_slice(piece),
            )
        })?;
        let bytes = if self.rank() == root { own } else { received };
        read(&bytes, root, site)
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
                return Err(Error::new(
                    Kind::Misuse,
                    format!(
                        "rank {root} is the root of scatter_object at {site}, and passed {} values for \
                         {world_size} ranks; pass one for each",
                        values.len()
                    ),
                ));
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
