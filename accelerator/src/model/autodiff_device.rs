//! Checks if a model lies on a device that records gradients.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::buffers::running_states;
use crate::core::error::{Error, Result};
use crate::core::module_path::ModulePath;

/// Refuses a model with a parameter on a plain device, which would be moved as one that is frozen.
pub(crate) fn check_autodiff<M: Module>(model: &M) -> Result<()> {
    let mut finder = PlainDeviceFinder::default();
    model.visit(&mut finder);
    if finder.plain.is_empty() {
        return Ok(());
    }
    // Statistics take no gradient anywhere.
    let running = running_states(model);
    let plain = finder.plain.iter().find(|(at, _)| !running.contains(at));
    let Some((_, path)) = plain else {
        return Ok(());
    };
    Err(Error::misuse(format!(
        "the parameter `{path}` of a model lies on a device that records no gradients (of `Device::default()`, \
         `.inner()` or `valid()`), so it would never be trained: build the model on `accelerator.device()`; for one \
         that is not to be trained, call `.no_grad()` on it there"
    )))
}

#[derive(Default)]
struct PlainDeviceFinder {
    path: ModulePath,
    /// The current place among the floats of the model.
    place: usize,
    /// The parameters on a plain device, by place.
    plain: Vec<(usize, String)>,
}

impl ModuleVisitor for PlainDeviceFinder {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // What is drawn lazily is drawn later, in its turn.
        if !param.lazy_device().is_autodiff() {
            self.plain.push((self.place, self.path.as_str().to_owned()));
        }
        self.place += 1;
    }
}
