use burn::backend::DispatchTensor;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{Adam, AdamConfig, AdamState, Optimizer};
use burn::tensor::{Device, Tensor};
use serde::Deserialize;

use super::memory::{KernelInput, Real};
use super::moments::{self, Betas, FusedAdamState, MomentRule, Moments};
use super::step::{self, settings};

/// Burn's [`Adam`] as one pass over memory; see the [module](crate::optim::fused). Made by
/// [`InitFused`](super::InitFused).
#[derive(Clone)]
#[allow(missing_debug_implementations, reason = "Burn's optimizers have none")]
pub struct FusedAdam {
    burn: Adam,
    settings: Option<AdamSettings>,
}

#[derive(Clone, Deserialize)]
struct AdamSettings {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
    weight_decay: Option<WeightDecayConfig>,
}

impl FusedAdam {
    pub(super) fn new(config: &AdamConfig) -> Self {
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

impl Optimizer for FusedAdam {
    type State<const D: usize> = FusedAdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<FusedAdamState<D>>,
    ) -> (Tensor<D>, Option<FusedAdamState<D>>) {
        let momentum = state.as_ref().map(|state| &state.momentum);
        match (&self.settings, moments::reach(&tensor, &grad, momentum)) {
            (None, _) | (_, KernelInput::None) => {
                let grad = step::gradient(&tensor, grad);
                let state = state.map(|state| AdamState::new(state.momentum));
                let (tensor, state) = self.burn.step(lr, tensor, grad, state);
                let fused = |state: AdamState<D>| FusedAdamState {
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

impl AdamSettings {
    fn step<E: Real>(
        &self,
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
        let scalar = |value: f32| E::of(f64::from(value));
        let update = |time: i32| {
            let correction_2 = (1.0 - self.beta_2.powi(time)).sqrt();
            AdamUpdate {
                factor: scalar(correction_2 / (1.0 - self.beta_1.powi(time))),
                epsilon: scalar(self.epsilon * correction_2),
                rate: E::of(lr),
            }
        };
        match &self.weight_decay {
            None => moments::step(betas, tensor, grad, state, update),
            Some(decay) => {
                let penalty = scalar(decay.penalty);
                let rule = |time| AdamDecayed(update(time), penalty);
                moments::step(betas, tensor, grad, state, rule)
            }
        }
    }
}

/// The update of a parameter by its moments.
#[derive(Clone, Copy)]
struct AdamUpdate<E> {
    factor: E,
    epsilon: E,
    rate: E,
}

/// The same, with a penalty on the parameter in the gradient.
#[derive(Clone, Copy)]
struct AdamDecayed<E>(AdamUpdate<E>, E);

impl<E: Real> MomentRule<E> for AdamUpdate<E> {
    #[inline(always)]
    fn gradient(self, _parameter: E, gradient: E) -> E {
        gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        parameter - moment_1 * self.factor / (moment_2.root() + self.epsilon) * self.rate
    }
}

impl<E: Real> MomentRule<E> for AdamDecayed<E> {
    #[inline(always)]
    fn gradient(self, parameter: E, gradient: E) -> E {
        parameter * self.1 + gradient
    }

    #[inline(always)]
    fn update(self, parameter: E, moment_1: E, moment_2: E) -> E {
        self.0.update(parameter, moment_1, moment_2)
    }
}
