//! The leaves of a model in the graph. All places of a tied parameter, such as the token embedding and the output
//! layer of a language model, share one leaf. A model gets new leaves when it is prepared.

use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

use crate::core::autodiff;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::module::{FloatParam, visit_floats};
use crate::core::tensor::any_rank;

/// Makes all places of a tied parameter share one tensor again, the one of the first place.
///
/// A parameter is tied where a model has it in several places under one `ParamId`, as a clone of a `Param` or of
/// a layer does. In Burn those places are one tensor until something replaces it. Burn's own optimizers do: they
/// step the first place and leave the others, and the next gradients of all places but the last are lost.
/// `valid`, `train`, `fork` and a change of `require_grad` make a tensor for each place, too.
///
/// Models that come out of this library are tied already: of [`prepare`](crate::Accelerator::prepare), the `step`
/// of a prepared optimizer, [`load_model`](crate::Accelerator::load_model),
/// [`resume`](crate::Accelerator::resume) and [local training](crate::local). Call this after the step of an
/// optimizer that was not prepared, and after whatever else separates the places;
/// [`backward`](crate::Accelerator::backward) refuses a model whose places are separate. What takes no gradient
/// stays as it is.
///
/// ```
/// use accelerator::model::retie_parameters;
/// use accelerator::prelude::*;
/// use burn::module::{Module, Param};
/// use burn::nn::{Embedding, EmbeddingConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Int, Tensor};
///
/// #[derive(Debug, Module)]
/// struct Bigrams {
///     tokens: Embedding,
///     head: Param<Tensor<2>>,
/// }
///
/// let accelerator = Accelerator::new()?;
/// let device = accelerator.device();
/// let tokens = EmbeddingConfig::new(8, 4).init(&device);
/// let head = tokens.weight.clone();
/// let model = accelerator.prepare(Bigrams { tokens, head })?;
/// let mut optimizer = SgdConfig::new().init();
///
/// let input = Tensor::<2, Int>::ones([1, 3], &device);
/// let logits = model.tokens.forward(input).matmul(model.head.val().transpose().unsqueeze());
/// let gradients = accelerator.backward(logits.powi_scalar(2).mean(), &model, 1)?;
/// if let Some(gradients) = gradients.into_params() {
///     let stepped = optimizer.step(0.1, model, gradients);
///     let model = retie_parameters(stepped);
///     assert_eq!(model.head.val().into_data(), model.tokens.weight.val().into_data());
/// }
/// # Ok::<(), Error>(())
/// ```
pub fn retie_parameters<M: Module + 'static>(model: M) -> M {
    let model = BoxedModule::new(model);
    TiedParameters::of(&model).retie(model).into_model()
}

/// Returns the model with new leaves of the graph, and the old leaf of its first trainable parameter. A loss that was
/// made with an earlier clone, which has the same ids on some ranks, gives it no gradient on any rank.
pub(crate) fn fresh_leaves(model: BoxedModule) -> (BoxedModule, Option<u64>) {
    let mut fresh = FreshLeaves { first: None };
    let model = model.map(&mut fresh);
    (model, fresh.first)
}

/// The places of a model that hold the same parameter. Places are counted over its floats, in the order of visits.
#[derive(Clone, Debug, Default)]
pub(crate) struct TiedParameters(HashMap<usize, TieRole>);

#[derive(Clone, Copy, Debug)]
enum TieRole {
    /// Others have what is in this place.
    First,
    /// The place has the parameter of that place.
    Later(usize),
}

impl TiedParameters {
    /// Returns the tied parameters that take a gradient.
    pub(crate) fn of(model: &dyn DynModule) -> Self {
        TieFinder::search(model).tied
    }

    /// The same, of a model whose places have the same values.
    pub(crate) fn checked(model: &dyn DynModule) -> Result<Self> {
        let finder = TieFinder::search(model);
        if let Some([frozen, trained]) = finder.half_frozen {
            return Err(Error::model(format!(
                "`{frozen}` is frozen, and `{trained}`, which has the same parameter id, is trained: Burn's \
                     optimizers would step the first; give the frozen one an id of its own \
                     (`param.id = ParamId::new()`), or put it behind the other"
            )));
        }
        match finder.apart.iter().find(|pair| !pair.is_equal()) {
            None => Ok(finder.tied),
            Some(Apart {
                paths: [first, other],
                ..
            }) => Err(Error::model(format!(
                "`{first}` and `{other}` have one parameter id, so they are one parameter, and their values \
                     differ: give each an id of its own (`param.id = ParamId::new()`), or make them one again \
                     with `accelerator::model::retie_parameters`"
            ))),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The model with the tensor of the first place in all places.
    pub(crate) fn retie(&self, model: BoxedModule) -> BoxedModule {
        if self.is_empty() {
            return model;
        }
        model.map(&mut Retier {
            first: HashMap::new(),
            place: 0,
            tied: self,
        })
    }

    /// Refuses a model whose places became several tensors: each would get a part of the gradient.
    pub(crate) fn check(&self, model: &dyn DynModule) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let finder = TieFinder::search(model);
        let is_trained = |place: &usize| finder.trained.get(*place) == Some(&true);
        let is_split = |(place, role): (&usize, &TieRole)| match role {
            TieRole::First => false,
            TieRole::Later(first) => is_trained(place) != is_trained(first),
        };
        if self.0.iter().any(is_split) {
            return Err(Error::misuse(
                "some places of a tied parameter were frozen or unfrozen since the model was prepared, and others \
                 were not: do so for all of its places, or prepare the model again",
            ));
        }
        match finder.apart.first() {
            None => Ok(()),
            Some(Apart {
                paths: [first, other],
                ..
            }) => Err(Error::misuse(format!(
                "`{first}` and `{other}` are one parameter, and became two tensors since the model was prepared, \
                 each of which gets a part of the gradient: call `accelerator::model::retie_parameters` after \
                 what separates them (the step of an optimizer that was not prepared, `train`, `fork`)"
            ))),
        }
    }
}

struct TiedPlace {
    path: String,
    place: usize,
    trained: bool,
    value: DispatchTensor,
}

/// Two places of one parameter that are two tensors.
struct Apart {
    paths: [String; 2],
    values: [DispatchTensor; 2],
}

impl Apart {
    fn is_equal(&self) -> bool {
        let [first, other] = self.values.each_ref().map(any_rank);
        first.shape() == other.shape() && first.into_data() == other.into_data()
    }
}

#[derive(Default)]
struct TieFinder {
    apart: Vec<Apart>,
    first: HashMap<ParamId, TiedPlace>,
    /// A frozen place, and a trained one behind it.
    half_frozen: Option<[String; 2]>,
    tied: TiedParameters,
    trained: Vec<bool>,
}

impl TieFinder {
    fn search(model: &dyn DynModule) -> Self {
        let mut finder = Self::default();
        visit_floats(model, |float| finder.visit(float));
        finder
    }

    fn visit(&mut self, float: FloatParam<'_>) {
        let here = TiedPlace {
            path: float.path.to_owned(),
            place: float.place,
            trained: float.is_trained,
            value: float.value,
        };
        self.trained.push(here.trained);
        let Some(first) = self.first.get(&float.id) else {
            self.first.insert(float.id, here);
            return;
        };
        // A frozen clone, such as a teacher, keeps its values.
        if !here.trained {
            return;
        }
        let paths = [&first.path, &here.path].map(String::clone);
        if !first.trained {
            self.half_frozen.get_or_insert(paths);
            return;
        }
        self.tied.0.insert(first.place, TieRole::First);
        self.tied.0.insert(here.place, TieRole::Later(first.place));
        if !autodiff::is_same_leaf(&first.value, &here.value) {
            self.apart.push(Apart {
                paths,
                values: [first.value.clone(), here.value],
            });
        }
    }
}

struct Retier<'a> {
    first: HashMap<usize, DispatchTensor>,
    place: usize,
    tied: &'a TiedParameters,
}

impl ModuleMapper for Retier<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.place;
        self.place += 1;
        match self.tied.0.get(&place) {
            None => param,
            Some(TieRole::First) => {
                self.first.insert(place, param.val().into_dispatch());
                param
            }
            Some(TieRole::Later(first)) => match self.first.get(first) {
                None => param,
                Some(value) => {
                    let (id, _, mapper) = param.consume();
                    let value = Tensor::<D>::from_dispatch(value.clone());
                    Param::from_mapped_value(id, value, mapper)
                }
            },
        }
    }
}

struct FreshLeaves {
    first: Option<u64>,
}

impl ModuleMapper for FreshLeaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let (id, old, mapper) = param.consume();
        if self.first.is_none() {
            self.first = autodiff::leaf_number(&old.clone().into_dispatch());
        }
        Param::from_mapped_value(id, old.detach().require_grad(), mapper)
    }
}
