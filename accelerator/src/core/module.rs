//! Marker types with which [`Prepare`](crate::Prepare), [`Save`](crate::checkpoint::Save) and
//! [`Resume`](crate::checkpoint::Resume) each cover every Burn module as well as other types. Programs never name a
//! marker; the compiler infers which one applies. This module also visits models by path.

use crate::core::dyn_module::DynModule;
use burn::backend::DispatchTensor;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

/// A Burn module.
#[derive(Debug)]
pub enum Model {}

/// A kind that nothing has.
#[derive(Debug)]
pub enum Never {}

/// Anything that is not a Burn module: an optimizer, a loader, a value of the program's own.
#[derive(Debug)]
pub enum Part {}

/// The place of a visitor or mapper in a model: `layers.0.weight`. For its `enter_module` and `exit_module`.
#[derive(Debug, Default)]
pub(crate) struct ModulePath {
    joined: String,
    /// The length of `joined` before each of its names.
    before: Vec<usize>,
}

impl ModulePath {
    pub(crate) fn enter(&mut self, name: &str) {
        let length = self.joined.len();
        if !self.before.is_empty() {
            self.joined.push('.');
        }
        self.joined.push_str(name);
        self.before.push(length);
    }

    pub(crate) fn exit(&mut self) {
        if let Some(length) = self.before.pop() {
            self.joined.truncate(length);
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.joined
    }
}

/// A float of a model, trained or not.
pub(crate) struct FloatParam<'a> {
    pub(crate) id: ParamId,
    pub(crate) is_trained: bool,
    pub(crate) path: &'a str,
    /// Its number among the floats of the model.
    pub(crate) place: usize,
    pub(crate) value: DispatchTensor,
}

/// Calls `take` with each float of a model, in the order in which Burn visits them.
pub(crate) fn visit_floats(model: &dyn DynModule, take: impl FnMut(FloatParam<'_>)) {
    model.visit(&mut FloatVisitor {
        path: ModulePath::default(),
        place: 0,
        take,
    });
}

struct FloatVisitor<F> {
    path: ModulePath,
    place: usize,
    take: F,
}

impl<F: FnMut(FloatParam<'_>)> ModuleVisitor for FloatVisitor<F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        (self.take)(FloatParam {
            id: param.id,
            is_trained: value.is_require_grad(),
            path: self.path.as_str(),
            place: self.place,
            value: value.into_dispatch(),
        });
        self.place += 1;
    }
}

/// Maps nothing itself, for a model that does so by itself while it is mapped.
pub(crate) struct Unchanged;

impl ModuleMapper for Unchanged {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_joined_and_left_again() {
        let mut path = ModulePath::default();
        for name in ["layers", "10", "weight"] {
            path.enter(name);
        }
        assert_eq!(path.as_str(), "layers.10.weight");
        path.exit();
        path.exit();
        path.enter("9");
        assert_eq!(path.as_str(), "layers.9");
        path.exit();
        path.exit();
        assert_eq!(path.as_str(), "");
        path.enter("bias");
        assert_eq!(path.as_str(), "bias");
    }
}
