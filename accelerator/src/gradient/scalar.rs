use core::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;

use super::flat;

/// A number, which is read from its device when somebody asks for it, and once.
#[derive(Clone)]
pub(crate) struct Scalar(Arc<ScalarValue>);

struct ScalarValue {
    /// Of one element; `None` where it was never on a device.
    there: Option<Tensor<1>>,
    read: OnceLock<f64>,
}

impl Scalar {
    /// What a device has in one element.
    pub(super) fn on_device(there: Tensor<1>) -> Self {
        Self(Arc::new(ScalarValue {
            there: Some(there),
            read: OnceLock::new(),
        }))
    }

    /// Where it lies.
    pub(super) fn there(&self) -> Option<&Tensor<1>> {
        self.0.there.as_ref()
    }

    /// Its value, for which this waits where it has not been read yet.
    pub(crate) fn read(&self) -> f64 {
        let ScalarValue { there, read } = &*self.0;
        *read.get_or_init(|| there.clone().map_or(f64::NAN, flat::number))
    }

    pub(super) fn is_read(&self) -> bool {
        self.0.read.get().is_some()
    }
}

impl From<f64> for Scalar {
    fn from(value: f64) -> Self {
        Self(Arc::new(ScalarValue {
            there: None,
            read: OnceLock::from(value),
        }))
    }
}

/// Without a wait.
impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.read.get() {
            Some(value) => value.fmt(f),
            None => f.write_str("on the device"),
        }
    }
}
