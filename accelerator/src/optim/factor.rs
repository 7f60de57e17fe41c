use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::tensor::Tensor;

use crate::core::module_path::ModulePath;

/// The rate of every parameter of the model, times a factor.
///
/// Burn's rate tells what each parameter gets, and has no other way in than a scheduler: so where
/// parameters differ, a constant one is made that has a group for each that does.
pub(super) fn scaled<M: Module>(
    rate: ModuleLearningRate,
    factor: f64,
    model: &M,
) -> ModuleLearningRate {
    if factor == 1.0 {
        return rate;
    }
    let mut reader = FactorReader {
        path: ModulePath::default(),
        rate: &rate,
        others: Vec::new(),
        trained: Vec::new(),
    };
    model.visit(&mut reader);
    if reader.others.is_empty() {
        return ModuleLearningRate::from(rate.base() * factor);
    }
    let scheduler = ModuleLrScheduler::new(rate.base() * factor);
    let others = reader.others.into_iter();
    others
        .fold(scheduler, |scheduler, (id, rate)| {
            scheduler.with_group(ParamGroup::from_ids(vec![id]), rate * factor)
        })
        .step()
}

/// Returns the rate of each trained parameter, times a factor, with the parameter's path.
pub(super) fn by_path<M: Module>(
    rate: &ModuleLearningRate,
    factor: f64,
    model: &M,
) -> Vec<(String, f64)> {
    let mut reader = FactorReader {
        path: ModulePath::default(),
        rate,
        others: Vec::new(),
        trained: Vec::new(),
    };
    model.visit(&mut reader);
    let trained = reader.trained.into_iter();
    trained.map(|(path, rate)| (path, rate * factor)).collect()
}

/// Collects rates, and the parameters that have another one than the base.
struct FactorReader<'a> {
    path: ModulePath,
    rate: &'a ModuleLearningRate,
    others: Vec<(ParamId, f64)>,
    trained: Vec<(String, f64)>,
}

impl ModuleVisitor for FactorReader<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.as_str();
        let rate = self.rate.lr_from_param(param.id, Some(path));
        if rate != self.rate.base() {
            self.others.push((param.id, rate));
        }
        if param.is_require_grad() {
            self.trained.push((path.to_owned(), rate));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn groups_keep_their_own_rates() {
        let model: Linear = LinearConfig::new(2, 1).init(&Device::default());
        let rate = || {
            ModuleLrScheduler::new(0.5_f64)
                .with_group(ParamGroup::from_predicate("bias"), 2.0_f64)
                .step()
        };
        let halved = scaled(rate(), 0.5, &model);
        assert_eq!(halved.base(), 0.25);
        let bias = model.bias.as_ref().unwrap().id;
        assert_eq!(halved.lr_from_param(bias, Some("bias")), 1.0);
        assert_eq!(halved.lr_from_param(model.weight.id, Some("weight")), 0.25);
        assert_eq!(scaled(rate(), 1.0, &model).base(), 0.5);
    }
}
