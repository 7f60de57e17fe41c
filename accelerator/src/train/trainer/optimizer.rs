//! Burn's optimizers by Hugging Face's arguments.

use burn::module::ParamGroup;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, Optimizer, SgdConfig};

use crate::optim::InitFused;
use crate::train::arguments::{OptimizerName, TrainingArguments};

/// The optimizer that the arguments name. Its weight decay leaves out biases and the parameters of norms.
pub(super) fn of(arguments: &TrainingArguments) -> ModuleOptimizer {
    let decay = arguments.weight_decay as f32;
    match arguments.optim {
        OptimizerName::AdamWTorchFused => {
            decaying(decay, |decay| adamw(arguments, decay).build_fused())
        }
        OptimizerName::AdamWTorch => decaying(decay, |decay| adamw(arguments, decay).build()),
        OptimizerName::Sgd => decaying(decay, |decay| sgd(arguments, decay).build_fused()),
    }
}

fn adamw(arguments: &TrainingArguments, decay: f32) -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_1(arguments.adam_beta1 as f32)
        .with_beta_2(arguments.adam_beta2 as f32)
        .with_epsilon(arguments.adam_epsilon as f32)
        .with_weight_decay(decay)
}

fn sgd(arguments: &TrainingArguments, decay: f32) -> SgdConfig {
    let momentum = (arguments.momentum > 0.0).then_some(MomentumConfig {
        momentum: arguments.momentum,
        dampening: 0.0,
        nesterov: false,
    });
    SgdConfig::new()
        .with_momentum(momentum)
        .with_weight_decay(penalty(decay))
}

fn penalty(decay: f32) -> Option<WeightDecayConfig> {
    (decay > 0.0).then(|| WeightDecayConfig::new(decay))
}

/// Builds one optimizer with the decay, and one without it for the parameters that Hugging Face's
/// `get_decay_parameter_names` leaves out.
fn decaying<O: Optimizer>(decay: f32, build: impl Fn(f32) -> O) -> ModuleOptimizer {
    let all = ModuleOptimizer::from(build(decay));
    match ParamGroup::from_regex(UNDECAYED) {
        Ok(undecayed) if decay > 0.0 => all.with_group(undecayed, build(0.0), None),
        _ => all,
    }
}

/// The parameters without decay, by their names in Burn's layers.
const UNDECAYED: &str = r"(^|\.)(bias|beta|gamma)$";
