use burn::backend::DispatchTensor;
use burn::optim::{AdamW, AdamWConfig, AdamWState, Optimizer};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use super::memory::{KernelInput, Real};
use super::moments::{self, Betas, FusedAdamState, MomentRule, Moments};
use super::step::{self, settings};

/// Burn's [`AdamW`] as one pass over memory; see the [module](crate::optim::fused). Made by
/// [`InitFused`](super::InitFused).
#[derive(Clone)]
#[allow(missing_debug_implementations, reason = "Burn's optimizers have none")]
pub struct FusedAdamW {
    burn: AdamW,
    settings: Option<AdamWSettings>,
}

#[derive(Clone, Copy, Deserialize)]
struct AdamWSettings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
}

impl FusedAdamW {
    pub(super) fn new(config: &AdamWConfig) -> Self {
        Self {
            burn: config.build(),
            settings: settings(config),
        }
    }

    #[cfg(test)]
    pub(super) fn is_fused(&self) -> bool {
        self.settings.is_some()
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = FusedAdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedAdamState<D>>,
    ) -> (Tensor<D>, Option<FusedAdamState<D>>) {
        let momentum = state.as_ref().map(|state| &state.momentum);
        match (self.settings, moments::reach(&tensor, &grad, momentum)) {
            (None, _) | (_, KernelInput::None) => {
                let grad = step::gradient(&tensor, grad);
                let state = state.map(|state| AdamWState::new(state.momentum));
                let (tensor, state) = self.burn.step(lr, tensor, grad, state);
                let fused = |state: AdamWState<D>| FusedAdamState {
                    momentum: state.momentum,
                };
                (tensor, state.map(fused))
            }
            (Some(settings), KernelInput::F32) => {
                moments::step_any_rank(tensor, grad, state, |tensor, grad, moments| {
                    settings.step::<f32>(lr, tensor, grad, moments)
                })
            }
            (Some(settings), KernelInput::F64) => {
                moments::step_any_rank(tensor, grad, state, |tensor, grad, moments| {
                    settings.step::<f64>(lr, tensor, grad, moments)
                })
            }
        }
    }

    fn to_device<const D: usize>(state: FusedAdamState<D>, device: &Device) -> FusedAdamState<D> {
        state.moved_to(device)
    }
}

impl AdamWSettings {
    fn step<E: Real>(
        self,
        lr: f64,
        tensor: DispatchTensor,
        grad: DispatchTensor,
        state: Option<Moments>,
    ) -> (DispatchTensor, Moments) {
        let betas = Betas {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            amsgrad: self.amsgrad,
        };
        let decay_rate = lr * f64::from(self.weight_decay);
        let scalar = |value: f32| E::of(f64::from(value));
        let update = move |time: i32| AdamWUpdate {
            correction_1: scalar(1.0 - self.beta_1.powi(time)),
            correction_2: scalar(1.0 - self.beta_2.powi(time)),
            epsilon: scalar(self.epsilon),
            rate: E::of(lr),
        };
        if decay_rate == 0.0 {
            moments::step(betas, tensor, grad, state, |time| Plain(update(time)))
        } else if self.cautious_weight_decay {
            let rate = E::of(decay_rate);
            let rule = |time| Cautious(update(time), rate);
            moments::step(betas, tensor, grad, state, rule)
        } else {
            let rest = E::of(1.0 - decay_rate);
            let rule = |time| AdamWDecayed(update(time), rest);
            moments::step(betas, tensor, grad, state, rule)
        }
    }
}

/// The update of a parameter by its moments.
#[derive(Clone, Copy)]
struct AdamWUpdate<E> {
    correction_1: E,
    correction_2: E,
    epsilon: E,
    rate: E,
}

impl<E: Real> AdamWUpdate<E> {
    #[inline(always)]
    fn of(self, decayed: E, moment_1: E, moment_2: E) -> E {
        let moment_1 = moment_1 / self.correction_1;
        let moment_2 = moment_2 / self.correction_2;
        decayed - moment_1 / (moment_2.root() + self.epsilon) * self.rate
    }
}

/// An update without decay.
#[derive(Clone, Copy)]
struct Plain<E>(AdamWUpdate<E>);

/// An update with decay, which leaves this share of the parameter.
#[derive(Clone, Copy)]
struct AdamWDecayed<E>(AdamWUpdate<E>, E);

/// An update with this rate of decay, if the decay does not go against the moment.
#[derive(Clone, Copy)]
struct Cautious<E>(AdamWUpdate<E>, E);

impl<E: Real> MomentRule<E> for Plain<E> {
    #[inline(always)]
    fn gradient(self, _parameter: E, gradient: E) -> E {
        gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.of(parameter, moment_1, moment_2)
    }
}

impl<E: Real> MomentRule<E> for AdamWDecayed<E> {
    #[inline(always)]
    fn gradient(self, _parameter: E, gradient: E) -> E {
        gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.of(parameter * self.1, moment_1, moment_2)
    }
}

impl<E: Real> MomentRule<E> for Cautious<E> {
    #[inline(always)]
    fn gradient(self, _parameter: E, gradient: E) -> E {
        gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        let differ = (parameter >= E::ZERO) != (moment_1 >= E::ZERO);
        let decay = if differ { E::ZERO } else { parameter * self.1 };
        self.0.of(parameter - decay, moment_1, moment_2)
    }
}
