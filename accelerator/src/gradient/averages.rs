use core::ops::Range;

use burn::module::ParamId;
use burn::tensor::{Device, Shape, Tensor};

use super::closed::{Closed, Values, factor};
use super::{bucket, values};
use crate::model::Trainable;

/// The averaged gradients of a window, to be read in parts.
pub(crate) struct Averages(pub(super) Box<Closed>);

impl Averages {
    /// The parameters that have a gradient, in path order: the same on every rank.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Trainable> {
        let parameters = self.0.slot.parameters().iter().enumerate();
        parameters
            .filter(|(index, parameter)| match &self.0.values {
                Values::Reduced(sums) => sums.place(*index).is_some(),
                Values::Untouched { gradients, .. } => values::look(gradients, parameter).is_some(),
            })
            .map(|(_, parameter)| parameter)
    }

    /// Those elements of a parameter's gradient, clipped if that was asked for, in that shape.
    pub(crate) fn part<const D: usize>(
        &self,
        id: ParamId,
        range: &Range<usize>,
        shape: &[usize],
    ) -> Option<Tensor<D>> {
        let Closed {
            device,
            factors,
            slot,
            values,
            ..
        } = &*self.0;
        let index = slot.number(id)?;
        let parameter = &slot.parameters()[index];
        match values {
            Values::Reduced(sums) => {
                let (buffer, place) = sums.place(index)?;
                let range = place.start + range.start..place.start + range.end;
                let factor = factor(factors, index);
                let data =
                    bucket::read(buffer, &range, parameter.float, shape, sums.divisor, factor);
                let dtype = data.dtype();
                Some(Tensor::from_data(data, (device, dtype)))
            }
            Values::Untouched { gradients, .. } => {
                let gradient = Tensor::<1>::from_dispatch(values::look(gradients, parameter)?);
                let elements = parameter.shape.iter().product::<usize>();
                let part = gradient.reshape([elements]).slice([range.clone()]);
                Some(part.reshape(Shape::from(shape.to_vec())))
            }
        }
    }

    /// The plain device of the gradients.
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }
}
