//! Model files: what is written, what is read, and what of it fits.
//!
//! [`Accelerator::save_model`](crate::Accelerator::save_model) and
//! [`load_model`](crate::Accelerator::load_model) write and read safetensors files, which every
//! other tool opens; the types here say how.

mod autodiff_device;
mod buffers;
mod dtype;
mod file;
mod file_layout;
mod layout;
mod leaves;
mod load;
mod load_report;
mod options;
mod read;
mod replicate;
mod snapshot;
mod staged;
mod tied;
mod values;
mod write;

use burn::module::Module;

pub(crate) use self::autodiff_device::check_autodiff;
pub(crate) use self::buffers::{running_states, settle_statistics, sync_buffers};
pub(crate) use self::file::save;
pub use self::file_layout::FileLayout;
pub(crate) use self::layout::{Float, KEEP_THE_ID, Layout, Trainable};
pub(crate) use self::leaves::fresh_leaves;
pub(crate) use self::load::{load_on_all, restore_values};
pub use self::load_report::{LoadReport, Misshapen, Mistyped};
pub use self::options::{LoadOptions, SaveOptions};
pub(crate) use self::read::ModelFile;
pub(crate) use self::replicate::from_rank_zero;
pub(crate) use self::snapshot::ModelSnapshot;
pub(crate) use self::tied::TiedParameters;
pub use self::tied::retie_parameters;
pub(crate) use self::values::float_values;
pub(crate) use self::write::FileNames;

/// Makes the model draw what it would draw lazily, in the order in which Burn visits it.
pub(crate) fn draw_all<M: Module>(model: &M) {
    Layout::of(model);
}
