//! The step of whole parameters, from sums where they lie if the optimizer can.

use core::fmt;
use std::collections::HashMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::fused::step::{self, StepOutput};
use super::sharded::param_shards;
use crate::core::dyn_module::BoxedModule;
use crate::core::tensor::register;
use crate::model::Trainable;
use crate::reduce::GradientSums;

/// The parameters that a fused optimizer steps.
#[derive(Debug, Default)]
pub(super) struct FusedSupport(HashMap<ParamId, FusedKind>);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum FusedKind {
    Fused,
    Other,
}

impl FusedSupport {
    pub(super) fn learn(&mut self, optimizer: &ModuleOptimizer, sums: &GradientSums) {
        let mut blank = None;
        for parameter in sums.parameters() {
            if self.0.contains_key(&parameter.id) {
                continue;
            }
            let blank = blank.get_or_insert_with(|| {
                let optimizer = optimizer.clone();
                optimizer.load_record(OptimizerRecord::default())
            });
            let kind = match is_fused(blank, parameter, sums.device()) {
                true => FusedKind::Fused,
                false => FusedKind::Other,
            };
            self.0.insert(parameter.id, kind);
        }
    }

    pub(super) fn is_fused(&self, id: ParamId) -> bool {
        self.0.get(&id) == Some(&FusedKind::Fused)
    }

    pub(super) fn ready(
        &mut self,
        optimizer: &ModuleOptimizer,
        mut sums: GradientSums,
    ) -> StepInput {
        if sums.are_on_device() {
            let gradients = sums.params(|_| true);
            return StepInput {
                sums,
                gradients,
                waiting: HashMap::new(),
            };
        }
        self.learn(optimizer, &sums);
        let mut gradients = sums.params(|id| !self.is_fused(id));
        let mut waiting = HashMap::new();
        for parameter in sums.parameters() {
            if self.is_fused(parameter.id) {
                if let Some(stand_in) = sums.stand_in(parameter.id) {
                    register(&mut gradients, parameter.id, stand_in);
                }
                waiting.insert(parameter.id, parameter.shape.iter().product());
            }
        }
        StepInput {
            sums,
            gradients,
            waiting,
        }
    }
}

/// The sums and the stand-in gradients of one step.
pub(super) struct StepInput {
    sums: GradientSums,
    gradients: GradientsParams,
    waiting: HashMap<ParamId, usize>,
}

impl StepInput {
    pub(super) fn step(
        self,
        optimizer: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        model: BoxedModule,
    ) -> BoxedModule {
        let Self {
            sums,
            gradients,
            waiting,
        } = self;
        let model = ObservedModel { model, waiting };
        let step = || optimizer.step(rate, model, gradients);
        step::step_on(sums, StepOutput::Parameter, step).0.model
    }
}

/// A model that says which parameter is stepped next.
#[derive(Clone)]
struct ObservedModel {
    model: BoxedModule,
    /// The parameters whose sums wait, with their numbers of elements.
    waiting: HashMap<ParamId, usize>,
}

impl Module for ObservedModel {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|model| model.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|model| model.to_device(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|model| model.valid())
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.model.visit(visitor);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        let Self { model, mut waiting } = self;
        let mut mapper = StepObserver {
            mapper,
            waiting: &mut waiting,
        };
        Self {
            model: model.map(&mut mapper),
            waiting,
        }
    }
}

impl ObservedModel {
    fn with(self, change: impl FnOnce(BoxedModule) -> BoxedModule) -> Self {
        Self {
            model: change(self.model),
            waiting: self.waiting,
        }
    }
}

impl fmt::Debug for ObservedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model.fmt(f)
    }
}

struct StepObserver<'a, P> {
    mapper: &'a mut P,
    waiting: &'a mut HashMap<ParamId, usize>,
}

impl<P: ModuleMapper> ModuleMapper for StepObserver<'_, P> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.mapper.enter_module(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.mapper.exit_module(name, container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A tied parameter is stepped in its first place.
        match self.waiting.remove(&param.id) {
            None => self.mapper.map_float(param),
            Some(elements) => {
                step::step_next(param.id, 0..elements, || self.mapper.map_float(param)).0
            }
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.mapper.map_int(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.mapper.map_bool(param)
    }

    fn map_flag(&mut self, param: Param<Flag>) -> Param<Flag> {
        self.mapper.map_flag(param)
    }
}

/// Returns `true` if an optimizer without state steps a parameter in the loops of `fused`.
pub(super) fn is_fused(blank: &ModuleOptimizer, parameter: &Trainable, device: &Device) -> bool {
    !blank.has_gradient_clipping()
        && step::steps_in_loops(|| drop(param_shards::step_sample(blank, parameter, device)))
}
