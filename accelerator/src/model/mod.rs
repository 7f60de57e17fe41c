//! Model files: saving, loading, and matching them with a model.
//!
//! [`Accelerator::save_model`](crate::Accelerator::save_model) and
//! [`load_model`](crate::Accelerator::load_model) write and read safetensors files, which every
//! other tool opens; the types here say how.

mod buffers;
mod format;
mod layout;
mod load;
mod load_report;
mod options;
mod read;
mod save;
mod snapshot;
mod tied;
mod values;

use burn::module::Module;

pub(crate) use self::buffers::{check_autodiff, running_states, settle_statistics, sync_buffers};
pub use self::format::FileLayout;
pub(crate) use self::format::FileNames;
pub(crate) use self::layout::{Float, KEEP_THE_ID, Layout, Trainable};
pub(crate) use self::load::{load_on_all, restore_values};
pub use self::load_report::{LoadReport, Misshapen, Mistyped};
pub use self::options::{LoadOptions, SaveOptions};
pub(crate) use self::read::ModelFile;
pub(crate) use self::save::save;
pub(crate) use self::snapshot::ModelSnapshot;
pub use self::tied::retie_parameters;
pub(crate) use self::tied::{TiedParameters, fresh_leaves};
pub(crate) use self::values::{float_values, from_rank_zero};

/// Makes the model draw what it would draw lazily, in the order in which Burn visits it.
pub(crate) fn draw_all<M: Module>(model: &M) {
    Layout::of(model);
}
