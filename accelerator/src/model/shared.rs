//! Frozen parameters in memory that the ranks of a host share.
//!
//! The ranks have the same values, and nobody trains them. So the first rank of each host puts them into memory that is
//! sealed, and the others map it. A page that something writes to nevertheless becomes the rank's own.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use accelerator_collective::ProcessGroup;
use accelerator_host::file_memory::SharedBytes;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};

use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{self, Result};
use crate::core::module::visit_floats;
use crate::core::offload;
use crate::core::partition::piece_of;
use crate::core::tensor::any_rank;

/// The size in bytes from which a parameter is shared.
const LARGE: usize = 1 << 20;

/// The size in bytes of all shared parameters from which they are worth it.
const WORTH_SHARING: usize = 16 << 20;

/// Every parameter begins at a multiple of this, the largest size of a page.
const ALIGNMENT: usize = 64 << 10;

/// Puts the large frozen parameters of a model on the CPU into memory that the ranks of a host share. All ranks call it,
/// with the same values. A host that cannot share memory keeps its copies.
#[track_caller]
pub(super) fn share_frozen(group: &ProcessGroup, model: BoxedModule) -> Result<BoxedModule> {
    let mut bytes = 0;
    let mut all_on_cpu = true;
    visit_large(&model, &mut |value| {
        bytes += byte_count(&value).next_multiple_of(ALIGNMENT);
        all_on_cpu &= is_on_flex(&value.device());
        Ok(())
    })?;
    // All ranks have the same model, but perhaps not the same kind of device.
    if bytes < WORTH_SHARING || group.all_gather(&[u8::from(all_on_cpu)])?.contains(&0) {
        return Ok(model);
    }
    let [host, _] = group.split_by_hosts()?;
    if host.world_size() == 1 {
        return Ok(model);
    }
    let write = |file: &mut File| write_large(&model, file);
    let offered = (host.rank() == 0).then(|| SharedBytes::new(bytes as u64, write));
    let offered = offered.map(|offered| offered.map_err(|error| unshared(&error)));
    let path = offered.as_ref().map(|offered| {
        let bytes = offered.as_ref().ok();
        bytes.map(SharedBytes::path)
    });
    let path: Option<PathBuf> = host.broadcast_object(path.as_ref(), 0)?;
    let Some(path) = path else {
        return Ok(model);
    };
    let opened = SharedBytes::open(&path).map_err(|error| unshared(&error));
    // The path leads to the bytes as long as the first rank has them open.
    host.barrier()?;
    drop(offered);
    let model = match opened {
        Ok(bytes) => model.map(&mut SharedWriter { bytes, offset: 0 }),
        Err(()) => return Ok(model),
    };
    // Otherwise glibc would keep the memory of the copies.
    accelerator_host::allocator::give_back_freed_memory();
    Ok(model)
}

fn unshared(error: &io::Error) {
    error::warn(&format!(
        "the ranks of this host do not share the memory of frozen parameters: {error}; each rank keeps a copy"
    ));
}

/// Calls `take` with each large frozen float of a model, in the order of its mapping.
fn visit_large(
    model: &dyn DynModule,
    take: &mut dyn FnMut(Tensor<1>) -> io::Result<()>,
) -> Result<()> {
    let mut outcome = Ok(());
    visit_floats(model, |float| {
        let value = any_rank(&float.value);
        if outcome.is_ok() && !float.is_trained && is_large(float.id, &value) {
            outcome = take(value);
        }
    });
    Ok(outcome?)
}

fn is_large<const D: usize>(id: ParamId, value: &Tensor<D>) -> bool {
    // Pieces differ between ranks, and quantised values have no form that could be mapped.
    piece_of(id).is_none() && value.dtype().is_float() && byte_count(value) >= LARGE
}

fn byte_count<const D: usize>(value: &Tensor<D>) -> usize {
    value.shape().num_elements() * value.dtype().size()
}

fn is_on_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    return device.clone().inner() == Device::flex();
    #[cfg(not(feature = "flex"))]
    false
}

fn write_large(model: &dyn DynModule, file: &mut File) -> io::Result<()> {
    let written = visit_large(model, &mut |value| {
        let data = value.into_data();
        let padding = data.bytes().len().next_multiple_of(ALIGNMENT) - data.bytes().len();
        file.write_all(data.bytes())?;
        file.write_all(&vec![0; padding])
    });
    written.map_err(io::Error::other)
}

/// Gives large frozen parameters the shared bytes, in the order in which they were written.
struct SharedWriter {
    bytes: SharedBytes,
    offset: u64,
}

impl ModuleMapper for SharedWriter {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val();
        if value.is_require_grad() || !is_large(param.id, &value) {
            return param;
        }
        let length = byte_count(&value);
        let mapped = self.bytes.map(self.offset, length);
        self.offset += length.next_multiple_of(ALIGNMENT) as u64;
        let Ok(memory) = mapped.map_err(|error| unshared(&error)) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let data = TensorData::from_bytes(offload::shared(memory), old.shape(), old.dtype());
        let new = Tensor::from_data(data, (&old.device(), old.dtype()));
        Param::from_mapped_value(id, new, mapper)
    }
}
