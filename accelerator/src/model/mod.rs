//! Model files: saving, loading, and matching them with a model.
//!
//! [`Accelerator::save_model`](crate::Accelerator::save_model) and
//! [`load_model`](crate::Accelerator::load_model) write and read safetensors files, which every
//! other tool opens; the types here say how.

mod buffers;
mod format;
mod frozen;
mod layout;
mod load;
mod peft;
mod read;
mod save;
#[cfg(target_os = "linux")]
mod shared;
mod snapshot;
mod tied;

use crate::core::dyn_module::DynModule;

pub(crate) use self::buffers::{check_autodiff, running_states, settle_statistics, sync_buffers};
pub use self::format::FileLayout;
pub(crate) use self::format::FileNames;
pub use self::format::{LoadOptions, SaveOptions};
pub(crate) use self::layout::{
    Float, KEEP_THE_ID, Layout, Trainable, float_values, from_rank_zero,
};
pub use self::load::{LoadReport, Misshapen, Mistyped};
pub(crate) use self::load::{load_on_all, restore_values};
pub(crate) use self::read::{FileBytes, ModelFile, has_adapters_alone};
pub(crate) use self::save::save;
pub(crate) use self::snapshot::ModelSnapshot;
pub use self::tied::retie_parameters;
pub(crate) use self::tied::{TiedParameters, fresh_leaves};

/// Makes the model draw what it would draw lazily, in the order in which Burn visits it.
pub(crate) fn draw_all(model: &dyn DynModule) {
    Layout::of(model);
}
