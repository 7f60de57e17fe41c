use core::fmt;
use core::ops::Range;
use std::sync::Arc;

use accelerator_collective::Buffer;
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Shape, Tensor};

use super::bucket;
use super::ledger::Ledger;
use super::rank::with_rank;
use super::reducer::Reduced;
use super::slot::Slot;
use super::values::Values as Elements;
use super::weight::Weight;
use crate::model::Trainable;

/// The averaged gradients of a window, or the news that it is still open.
///
/// Pass them to [`PreparedOptimizer::step`](crate::optim::PreparedOptimizer::step) in either
/// case: an open window leaves the model as it is. Burn's own optimizers do not take them: where
/// the compiler says "expected `GradientsParams`, found `Gradients`", the optimizer was not passed
/// through [`Accelerator::prepare`](crate::Accelerator::prepare).
///
/// Between `backward` and `step` they can be clipped and asked for the loss:
///
/// ```
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
///
/// let accelerator = Accelerator::new()?;
/// let device = accelerator.device();
/// let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
///
/// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
/// let gradients = accelerator.backward(loss, &model, 4)?;
/// assert!(gradients.loss().is_some() && gradients.samples() == Some(4.0));
/// let mut gradients = gradients.clip_norm(0.5);
/// assert!(gradients.norm().is_some_and(|norm| norm > 1.0), "before clipping");
/// # Ok::<(), Error>(())
/// ```
#[must_use = "pass gradients to the optimizer's `step`"]
pub struct Gradients(Content);

enum Content {
    Accumulating,
    Closed(Box<Closed>),
}

struct Closed {
    device: Device,
    epoch: Option<u64>,
    /// What every element is multiplied by in the end.
    factor: Option<f64>,
    /// Before clipping.
    norm: Option<f64>,
    slot: Arc<Slot>,
    values: Values,
}

#[allow(clippy::large_enum_variant, reason = "it lies in a box already")]
enum Values {
    /// Sums over all ranks.
    Reduced(Sums),
    /// One rank, no accumulation: as Burn made them.
    Untouched {
        gradients: GradientsParams,
        loss: Tensor<1>,
        samples: f64,
    },
}

/// Sums, whose ledger goes back to its slot.
struct Sums {
    /// There until it is dropped.
    ledger: Option<Ledger>,
    loss: f64,
    slot: Arc<Slot>,
    total: f64,
}

impl Gradients {
    pub(super) fn accumulating() -> Self {
        Self(Content::Accumulating)
    }

    pub(super) fn untouched(
        slot: Arc<Slot>,
        gradients: GradientsParams,
        loss: Tensor<1>,
        weight: Weight,
    ) -> Self {
        Self::closed(
            slot,
            loss.device(),
            weight.epoch,
            Values::Untouched {
                gradients,
                loss,
                samples: weight.count,
            },
        )
    }

    pub(super) fn reduced(
        slot: Arc<Slot>,
        device: Device,
        reduced: Reduced,
        epoch: Option<u64>,
    ) -> Self {
        let sums = Sums {
            ledger: Some(reduced.ledger),
            loss: reduced.loss,
            slot: slot.clone(),
            total: reduced.total,
        };
        Self::closed(slot, device, epoch, Values::Reduced(sums))
    }

    fn closed(slot: Arc<Slot>, device: Device, epoch: Option<u64>, values: Values) -> Self {
        Self(Content::Closed(Box::new(Closed {
            device,
            epoch,
            factor: None,
            norm: None,
            slot,
            values,
        })))
    }

    /// Scales the gradient down to the norm `max`, where it is longer: one norm over all
    /// parameters, as `clip_grad_norm_` does in PyTorch, not one for each as Burn's
    /// `GradientClippingConfig::Norm`. Nothing happens while the window is open.
    ///
    /// The factor is `max / (norm + 1e-6)`. Of two calls the stricter one holds; a negative `max`
    /// is taken as 0.
    pub fn clip_norm(mut self, max: f64) -> Self {
        if let Some(norm) = self.norm()
            && let Content::Closed(closed) = &mut self.0
        {
            let factor = max.max(0.0) / (norm + 1e-6);
            // Also when the norm is NaN: nothing is hidden then.
            if factor.is_nan() || factor < closed.factor.unwrap_or(1.0) {
                closed.factor = Some(factor);
            }
        }
        self
    }

    /// The L2 norm of the averaged gradient over all parameters, before clipping; `None` while
    /// the window is open. Squares are added up in f64, parameter by parameter in path order, so
    /// every rank has the same bits.
    pub fn norm(&mut self) -> Option<f64> {
        let Content::Closed(closed) = &mut self.0 else {
            return None;
        };
        if closed.norm.is_none() {
            closed.norm = Some(closed.values.squares(&closed.slot, &closed.device).sqrt());
        }
        closed.norm
    }

    /// The mean loss over every sample of every rank and micro-step; `None` while the window is
    /// open. It was reduced with the gradients and costs no communication: it is the same on all ranks,
    /// and must not be reduced again.
    ///
    /// The mean loss of an epoch, over all ranks, each window counting with its samples:
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let losses = Accelerator::builder().launch(2, |accelerator| {
    ///     let device = accelerator.device();
    ///     let model: Linear = accelerator.init(|device| LinearConfig::new(2, 1).init(device));
    ///     let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
    ///
    ///     let mut epoch = Mean::new();
    ///     for samples in [4, 4, 2] {
    ///         let input = Tensor::<2>::ones([samples, 2], &device);
    ///         let loss = model.forward(input).powi_scalar(2).mean();
    ///         let gradients = accelerator.backward(loss, &model, samples)?;
    ///         // `None` while gradients are accumulated.
    ///         if let (Some(loss), Some(samples)) = (gradients.loss(), gradients.samples()) {
    ///             epoch.update(loss, samples as usize);
    ///         }
    ///         model = optimizer.step(0.1, model, gradients);
    ///     }
    ///     accelerator.print(format_args!("mean loss {epoch}"));
    ///     assert_eq!(epoch.samples(), 20.0, "of both ranks");
    ///     Ok(epoch.value())
    /// })?;
    /// assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn loss(&self) -> Option<f64> {
        match &self.closed_ref()?.values {
            Values::Reduced(sums) => Some(sums.loss),
            Values::Untouched { loss, .. } => Some(loss.clone().into_scalar::<f64>()),
        }
    }

    /// Over how many samples (or tokens) of all ranks this is the average; `None` while the window is
    /// open. As the [`loss`](Self::loss), it must not be reduced again.
    pub fn samples(&self) -> Option<f64> {
        match &self.closed_ref()?.values {
            Values::Reduced(sums) => Some(sums.total),
            Values::Untouched { samples, .. } => Some(*samples),
        }
    }

    /// Whether the window is still open, so that an optimizer will not step.
    pub fn is_accumulating(&self) -> bool {
        matches!(self.0, Content::Accumulating)
    }

    /// As Burn's own type, clipped if that was asked for; `None` while the window is open.
    pub fn into_params(self) -> Option<GradientsParams> {
        let Content::Closed(closed) = self.0 else {
            return None;
        };
        let Closed {
            device,
            factor,
            slot,
            values,
            ..
        } = *closed;
        match values {
            Values::Reduced(sums) => Some(sums.into_params(&device, factor)),
            Values::Untouched { mut gradients, .. } => {
                if let Some(factor) = factor {
                    for parameter in slot.parameters() {
                        with_rank!(parameter.shape.len(), D => {
                            if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                                gradients.register(parameter.id, gradient.mul_scalar(factor));
                            }
                        });
                    }
                }
                Some(gradients)
            }
        }
    }

    /// For an optimizer that steps parts of parameters; `None` while the window is open.
    pub(crate) fn into_averages(self) -> Option<Averages> {
        match self.0 {
            Content::Accumulating => None,
            Content::Closed(closed) => Some(Averages(closed)),
        }
    }

    pub(crate) fn epoch(&self) -> Option<u64> {
        self.closed_ref()?.epoch
    }

    /// The norm, if somebody asked for it.
    pub(crate) fn known_norm(&self) -> Option<f64> {
        self.closed_ref()?.norm
    }

    fn closed_ref(&self) -> Option<&Closed> {
        match &self.0 {
            Content::Accumulating => None,
            Content::Closed(closed) => Some(closed),
        }
    }
}

/// The averaged gradients of a window, to be read in parts.
pub(crate) struct Averages(Box<Closed>);

impl Averages {
    /// The parameters that have a gradient, in path order: the same on every rank.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Trainable> {
        let parameters = self.0.slot.parameters().iter().enumerate();
        parameters
            .filter(|(index, parameter)| match &self.0.values {
                Values::Reduced(sums) => sums.place(*index).is_some(),
                Values::Untouched { gradients, .. } => {
                    super::values::look(gradients, parameter).is_some()
                }
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
            factor,
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
                let data =
                    bucket::read(buffer, &range, parameter.float, shape, sums.total, *factor);
                let dtype = data.dtype();
                Some(Tensor::from_data(data, (device, dtype)))
            }
            Values::Untouched { gradients, .. } => {
                let gradient =
                    Tensor::<1>::from_dispatch(super::values::look(gradients, parameter)?);
                let elements = parameter.shape.iter().product::<usize>();
                let part = gradient.reshape([elements]).slice([range.clone()]);
                let part = part.reshape(Shape::from(shape.to_vec()));
                Some(match factor {
                    Some(factor) => part.mul_scalar(*factor),
                    None => part,
                })
            }
        }
    }

    /// The plain device of the gradients.
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }
}

impl fmt::Debug for Gradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.closed_ref() {
            None => f.write_str("Gradients(accumulating)"),
            Some(closed) => f
                .debug_struct("Gradients")
                .field("epoch", &closed.epoch)
                .field("norm", &closed.norm)
                .field("samples", &self.samples())
                .finish_non_exhaustive(),
        }
    }
}

impl Values {
    /// The sum of the squares of all elements.
    fn squares(&mut self, slot: &Slot, device: &Device) -> f64 {
        let mut sum = 0.0;
        match self {
            Self::Reduced(sums) => {
                for (_, buffer, range) in sums.there() {
                    sum += bucket::squares(buffer, range, sums.total);
                }
            }
            Self::Untouched { gradients, .. } => {
                for parameter in slot.parameters() {
                    with_rank!(parameter.shape.len(), D => {
                        if let Some(gradient) = gradients.remove::<D>(parameter.id) {
                            // Taken out and put back, the data is nobody else's and not copied.
                            let data = gradient.into_data();
                            sum += bucket::squares_of(Elements::of(&data));
                            let dtype = data.dtype();
                            let gradient = Tensor::<D>::from_data(data, (device, dtype));
                            gradients.register(parameter.id, gradient);
                        }
                    });
                }
            }
        }
        sum
    }
}

impl Sums {
    /// The parameters that have a gradient, in path order, and where its sum lies.
    fn there(&self) -> impl Iterator<Item = (&Trainable, &Buffer, &Range<usize>)> {
        let parameters = self.slot.parameters().iter().enumerate();
        parameters.filter_map(|(index, parameter)| {
            let (sums, range) = self.place(index)?;
            Some((parameter, sums, range))
        })
    }

    /// Where the sum of a parameter lies, if it has a gradient.
    fn place(&self, index: usize) -> Option<(&Buffer, &Range<usize>)> {
        let ledger = self.ledger.as_ref()?;
        let place = ledger.layout.place(index);
        let sums = ledger.sums(place.bucket)?;
        ledger.present[index].then_some((sums, &place.range))
    }

    fn into_params(self, device: &Device, factor: Option<f64>) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (parameter, buffer, range) in self.there() {
            let (float, shape) = (parameter.float, &parameter.shape);
            let data = bucket::read(buffer, range, float, shape, self.total, factor);
            let dtype = data.dtype();
            with_rank!(parameter.shape.len(), D => {
                let gradient = Tensor::<D>::from_data(data, (device, dtype));
                gradients.register(parameter.id, gradient);
            });
        }
        gradients
    }
}

impl Drop for Sums {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.take() {
            self.slot.take_back(ledger);
        }
    }
}
