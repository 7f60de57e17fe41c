pub(crate) mod agreement;
pub(crate) mod autodiff;
pub(crate) mod device;
pub(crate) mod dyn_module;
pub(crate) mod error;
pub(crate) mod module;
pub(crate) mod preemption;
pub(crate) mod tensor;
