use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor};

use super::model_state::{ModelState, WorkingPart};
use super::reduce_context::ReduceContext;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::module::ModulePath;
use crate::precision::Cast;

/// The model with parameters in the precision to compute in, but for those that `keep` chooses by their paths.
pub(crate) fn working_copy(
    context: &ReduceContext,
    model: &dyn DynModule,
    keep: &dyn Fn(&str) -> bool,
) -> BoxedModule {
    let Some(dtype) = context.settings.precision.dtype() else {
        return model.boxed();
    };
    context.working.note_copied();
    // One that was not prepared, for evaluation say, has no gradients to wait for.
    let model_state = context.models.find(model).ok();
    let mut caster = Caster {
        dtype,
        keep,
        norms: 0,
        parts: Vec::new(),
        path: ModulePath::default(),
        model_state: model_state.as_deref(),
        trains: false,
    };
    if let Some(model_state) = &model_state {
        caster
            .parts
            .resize_with(model_state.parameters().len(), || None);
    }
    let copy = model.boxed().map(&mut caster);
    let Caster { parts, trains, .. } = caster;
    if let Some(model_state) = &model_state {
        if trains {
            model_state.warnings.note_copied();
        }
        if parts.iter().any(Option::is_some) {
            model_state.note_working(parts);
        }
    }
    copy
}

/// Casts parameters inside the graph, and notes what became of those that take a gradient.
struct Caster<'a> {
    dtype: FloatDType,
    keep: &'a dyn Fn(&str) -> bool,
    /// The number of enclosing layers that do not compute in half precision.
    norms: usize,
    parts: Vec<Option<WorkingPart>>,
    path: ModulePath,
    model_state: Option<&'a ModelState>,
    trains: bool,
}

impl ModuleMapper for Caster<'_> {
    fn enter_module(&mut self, name: &str, kind: &str) {
        self.path.enter(name);
        self.norms += usize::from(is_norm(kind));
    }

    fn exit_module(&mut self, _name: &str, kind: &str) {
        self.path.exit();
        self.norms -= usize::from(is_norm(kind));
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.trains |= param.is_require_grad();
        if self.norms > 0 || (self.keep)(self.path.as_str()) {
            return param;
        }
        let (id, value, mapper) = param.consume();
        // Burn cannot cast quantised tensors, as `apply_qlora` makes them.
        let value = match value.dtype() {
            DType::QFloat(_) => value.dequantize(),
            _ => value,
        };
        let trained = value.is_require_grad();
        let index = self
            .model_state
            .and_then(|model_state| model_state.number(id));
        let part = index.filter(|_| trained);
        let mut part = part.and_then(|index| self.parts.get_mut(index));
        // All places of a tied parameter get one cast, and it one gradient.
        if let Some(Some(part)) = &part {
            let working = Tensor::<D>::from_dispatch(part.tensor.clone());
            return Param::from_mapped_value(id, working, mapper);
        }
        let (working, cast) = match trained {
            true => Cast::of(value, self.dtype),
            false => (value.cast(self.dtype), None),
        };
        if let Some(part) = &mut part {
            **part = Some(WorkingPart {
                tensor: working.clone().into_dispatch(),
                cast,
            });
        }
        Param::from_mapped_value(id, working, mapper)
    }
}

/// Layers whose running statistics are shared by all copies of them, and stay in full precision: Burn's,
/// and ours.
fn is_norm(kind: &str) -> bool {
    kind.ends_with(":BatchNorm") || kind.ends_with(":SyncBatchNorm")
}
