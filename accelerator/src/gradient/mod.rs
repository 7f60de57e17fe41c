mod backward;
mod bucket;
mod gradients;
mod rank;
mod slot;
mod weight;
mod window;

pub(crate) use self::backward::backward;
pub use self::gradients::Gradients;
pub(crate) use self::slot::Slot;
pub use self::weight::Weight;
