//! The trained parameters of a model, taken out and put back.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::core::error::{Error, Result};
use crate::reduce::ModelState;

/// The values by the numbers of their parameters, on the plain device.
pub(super) fn of<M: Module>(model: &M, model_state: &ModelState) -> Result<Vec<DispatchTensor>> {
    let mut reader = LocalReader {
        model_state,
        values: vec![None; model_state.parameters().len()],
    };
    model.visit(&mut reader);
    let values = reader.values.into_iter().zip(model_state.parameters());
    let values = values.map(|(value, known)| {
        value.ok_or_else(|| {
            Error::misuse(format!(
                "there is no parameter `{}` with this model's id where local training looks for it: begin it \
                 with the model that is trained, after `prepare` and `resume`, or resume both",
                known.path
            ))
        })
    });
    values.collect()
}

/// The model with zeros everywhere, for evaluation: also where it is frozen, which may end.
pub(super) fn zeros<M: Module>(model: &M) -> M {
    model.valid().map(&mut ZeroParameters)
}

/// The form of a model: with gradients recorded or not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum GradientForm {
    Plain,
    Trained,
}

/// The model with other values, which are given by the numbers of their parameters.
pub(super) fn replace<M: Module>(
    model: &M,
    model_state: &ModelState,
    form: GradientForm,
    values: &[DispatchTensor],
) -> M {
    let mut writer = LocalWriter {
        model_state,
        form,
        values: values.iter().cloned().map(Some).collect(),
    };
    model_state.tied().retie(model.clone().map(&mut writer))
}

struct LocalReader<'a> {
    model_state: &'a ModelState,
    values: Vec<Option<DispatchTensor>>,
}

impl ModuleVisitor for LocalReader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A frozen clone may come behind the parameter.
        if let Some(number) = self.model_state.number(param.id)
            && self.values[number].is_none()
        {
            let value = param.val().without_autodiff();
            self.values[number] = Some(value.into_dispatch());
        }
    }
}

struct ZeroParameters;

impl ModuleMapper for ZeroParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, value.zeros_like(), mapper)
    }
}

struct LocalWriter<'a> {
    model_state: &'a ModelState,
    form: GradientForm,
    /// The values that have no place yet.
    values: Vec<Option<DispatchTensor>>,
}

impl ModuleMapper for LocalWriter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let number = self.model_state.number(param.id);
        let Some(value) = number.and_then(|number| self.values[number].take()) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value);
        let value = match self.form {
            GradientForm::Plain => value,
            GradientForm::Trained => Tensor::from_inner(value).require_grad(),
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
