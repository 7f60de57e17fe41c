//! The trained parameters of a model, taken out and put back.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::error::{Error, Result};
use crate::gradient::Slot;

/// The values by the numbers of their parameters, on the plain device.
pub(super) fn of<M: Module>(model: &M, slot: &Slot) -> Result<Vec<DispatchTensor>> {
    let mut reader = Reader {
        slot,
        values: vec![None; slot.parameters().len()],
    };
    model.visit(&mut reader);
    let values = reader.values.into_iter().zip(slot.parameters());
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
    model.valid().map(&mut Zeros)
}

/// Whether gradients of a model are recorded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Form {
    Plain,
    Trained,
}

/// The model with other values, which are given by the numbers of their parameters.
pub(super) fn replace<M: Module>(
    model: &M,
    slot: &Slot,
    form: Form,
    values: &[DispatchTensor],
) -> M {
    let mut writer = Writer {
        slot,
        form,
        values: values.iter().cloned().map(Some).collect(),
    };
    slot.tied().retie(model.clone().map(&mut writer))
}

struct Reader<'a> {
    slot: &'a Slot,
    values: Vec<Option<DispatchTensor>>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A frozen clone may come behind the parameter.
        if let Some(number) = self.slot.number(param.id)
            && self.values[number].is_none()
        {
            let value = param.val().without_autodiff();
            self.values[number] = Some(value.into_dispatch());
        }
    }
}

struct Zeros;

impl ModuleMapper for Zeros {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, value.zeros_like(), mapper)
    }
}

struct Writer<'a> {
    slot: &'a Slot,
    form: Form,
    /// Those that have no place yet.
    values: Vec<Option<DispatchTensor>>,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let number = self.slot.number(param.id);
        let Some(value) = number.and_then(|number| self.values[number].take()) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        let value = Tensor::<D>::from_dispatch(value);
        let value = match self.form {
            Form::Plain => value,
            Form::Trained => Tensor::from_inner(value).require_grad(),
        };
        Param::from_mapped_value(id, value, mapper)
    }
}
