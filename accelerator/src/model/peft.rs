//! Adapters in the files of PEFT, Hugging Face's library: `adapter_model.safetensors` and `adapter_config.json`.
//!
//! A factor of PEFT is the transpose of Burn's: the weight is `W + scale · a · b` here, and `Wᵀ + scale · B · A` there. The
//! file of tensors does not have the scale: the configuration has it as `lora_alpha / r`, with patterns for modules that
//! have other numbers.

use core::fmt;
use core::marker::PhantomData;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use burn::module::{
    LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterizer,
};
use burn::tensor::{DType, Tensor};
use regex::Regex;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::format::{FileLayout, FilePath, PEFT_PREFIX};
use super::read::ModelFile;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Kind, Result};
use crate::core::partition::{is_sharded, piece_of};

pub(super) const CONFIG_FILE: &str = "adapter_config.json";

/// The parts of a model that go into PEFT's files.
pub(super) struct PeftExport {
    config: AdapterConfig,
    saved_modules: BTreeSet<String>,
}

impl PeftExport {
    /// Surveys a model whose trained parameters are these, if they are known; otherwise, those that require gradients are.
    pub(super) fn of(model: &dyn DynModule, trained: Option<&HashSet<ParamId>>) -> Result<Self> {
        let survey = Survey::of(model, trained);
        let mut adapters = BTreeMap::new();
        for (path, scale) in survey.scales(model) {
            let Adapted {
                module,
                rank,
                names,
                is_trained,
            } = &survey.adapted[&path];
            if names.is_none() || module.is_empty() {
                return Err(Error::model(format!(
                    "`{path}` has an adapter, and PEFT has adapters only for the weights of `Linear` and `Embedding` layers \
                     within a model: leave this one out with `Lora::set_param_group`, or save in another layout"
                )));
            }
            if trained.is_none() && !is_trained {
                return Err(Error::model(
                    "the adapters of the model require no gradients, so it is not known which other layers were trained: save \
                     the model that was prepared, and not a copy of it for inference",
                ));
            }
            // In the shortest form that the product has in the precision of the scale.
            let alpha = scale * *rank as f32;
            let alpha = alpha.to_string().parse().unwrap_or(f64::from(alpha));
            adapters.insert(module.clone(), RankAndAlpha { rank: *rank, alpha });
        }
        let Some(common) = most_common(&adapters) else {
            return Err(Error::model(
                "the model has no LoRA adapters: attach them with `apply_lora`, or save it in another layout",
            ));
        };
        let mut saved_modules = BTreeSet::new();
        for (path, module) in &survey.trained {
            if module.is_empty() || adapters.contains_key(module) {
                return Err(Error::model(format!(
                    "`{path}` is trained, but its layer also has an adapter or is the model itself; PEFT can save only whole \
                     layers beside adapters: freeze it, or save the model in another layout"
                )));
            }
            saved_modules.insert(module.clone());
        }
        // PEFT has no other form for them than names with which the names of modules end.
        for saved in &saved_modules {
            let mut others = survey.modules.difference(&saved_modules);
            if let Some(other) = others.find(|other| other.ends_with(saved)) {
                return Err(Error::model(format!(
                    "`{saved}` is trained whole, and PEFT would take `{other}`, whose name ends with that, for trained as well: \
                     rename one of them, or save the model in another layout"
                )));
            }
        }
        let config = AdapterConfig::new(&adapters, common, &saved_modules, &survey.modules);
        Ok(Self {
            config,
            saved_modules,
        })
    }

    /// Returns `true` if the files have the parameter at this place.
    pub(super) fn has(&self, place: &FilePath) -> bool {
        place.adapted().is_some() || self.saved_modules.contains(&place.module())
    }

    pub(super) fn config(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec_pretty(&self.config)
    }
}

/// Adapters to attach to a model, by the paths of the parameters that they adapt.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Attachments {
    adapters: BTreeMap<String, Attachment>,
    /// The paths of the parameters that stay trainable.
    trained: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Attachment {
    rank: usize,
    scale: f64,
}

impl Attachments {
    /// Returns the adapters that PEFT's files have and the model does not. `originals` has the names in the file, keyed by
    /// the names after renaming.
    ///
    /// # Errors
    ///
    /// [`Error::is_model`] if the files have another kind of adapter, or an adapter of the model has another scale.
    pub(super) fn needed_by(
        model: &dyn DynModule,
        file: &ModelFile,
        originals: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let config = AdapterConfig::read(file)?;
        let survey = Survey::of(model, None);
        let scales = survey.scales(model);
        let mut needed = Self::default();
        let mut adapted = BTreeSet::new();
        for Adaptable {
            path,
            module,
            names,
        } in &survey.adaptable
        {
            let Some(original) = originals.get(&names[0]) else {
                continue;
            };
            let Some((_, stored)) = file.find(original) else {
                continue;
            };
            let &[rank, _] = &stored.shape[..] else {
                continue;
            };
            let scale = config.scale(module_of(original), rank)?;
            match scales.get(path) {
                None => {
                    let attachment = Attachment { rank, scale };
                    needed.adapters.insert(path.clone(), attachment);
                    adapted.insert(module);
                }
                Some(&own) if (f64::from(own) - scale).abs() > 1e-6 * scale.abs() => {
                    return Err(Error::model(format!(
                        "the adapter of `{path}` has the scale {own}, and the one in `{}` has {scale} (`lora_alpha / r`): \
                         call `apply_lora` with the numbers of the file, or leave it out, and loading attaches the adapters",
                        file.path().display()
                    )));
                }
                Some(_) => {}
            }
        }
        if !needed.adapters.is_empty() {
            if is_sharded(model) {
                return Err(Error::misuse(
                    "adapters cannot be attached to a model whose units are sharded: load them before `prepare`",
                ));
            }
            let is_saved = |module: &String| {
                let mut saved = config.modules_to_save.iter().flatten();
                saved.any(|name| module.ends_with(name)) && !adapted.contains(module)
            };
            let trained = survey.trained.iter();
            let trained = trained.filter(|(_, module)| is_saved(module));
            needed.trained = trained.map(|(path, _)| path.clone()).collect();
            let own = survey.adapted.keys();
            let factors = own.flat_map(|path| ["a", "b"].map(|name| format!("{path}.lora.{name}")));
            needed.trained.extend(factors);
        }
        Ok(needed)
    }

    /// Attaches the adapters, with factors of zeros, and freezes the other parameters as
    /// [`apply_lora`](Module::apply_lora) does.
    pub(super) fn attach(self, model: BoxedModule) -> BoxedModule {
        if self.adapters.is_empty() {
            return model;
        }
        model.apply_reparameterization(self)
    }
}

impl Reparameterizer for Attachments {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        if self.trained.contains(path) {
            return (param, None);
        }
        let base = param.set_require_grad(false);
        let Some(&Attachment { rank, scale }) = self.adapters.get(path) else {
            return (base, None);
        };
        let value = base.val();
        let (shape, device, dtype) = (value.dims(), value.device(), value.dtype());
        let dtype = if dtype.is_float() { dtype } else { DType::F32 };
        let zeros = |shape| Param::from_tensor(Tensor::zeros(shape, (&device, dtype)));
        // Only matrices are adaptable.
        let (inputs, outputs) = (shape[0], shape[D - 1]);
        let adapter = LoraAdapter {
            a: zeros([inputs, rank]),
            b: zeros([rank, outputs]),
            scale,
        };
        (base, Some(adapter))
    }
}

/// The configuration of adapters, as PEFT writes and reads it. PEFT takes its own defaults for what is not there.
#[derive(Debug, Deserialize, Serialize)]
struct AdapterConfig {
    peft_type: String,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
    #[serde(default)]
    task_type: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    target_modules: TargetModules,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    rank_pattern: Patterns<usize>,
    #[serde(default)]
    alpha_pattern: Patterns<f64>,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    inference_mode: bool,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The settings of PEFT with which adapters are other functions of their factors, or of another base.
const REFUSED: [&str; 14] = [
    "alora_invocation_tokens",
    "arrow_config",
    "bias",
    "init_lora_weights",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
    "monteclora_config",
];

/// Values by regular expressions of module names. The first one that matches counts.
#[derive(Debug)]
struct Patterns<T>(Vec<(String, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patterns<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for InOrder<T> {
            type Value = Patterns<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of patterns, or null")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Patterns::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Patterns(entries))
            }
        }
        deserializer.deserialize_any(InOrder(PhantomData))
    }
}

/// The adapted modules: by names, each of which also stands for modules that end with it, or by a regular expression.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum TargetModules {
    Names(Vec<String>),
    Pattern(Option<String>),
}

impl Default for TargetModules {
    fn default() -> Self {
        Self::Pattern(None)
    }
}

#[derive(Clone, Copy, PartialEq)]
struct RankAndAlpha {
    rank: usize,
    alpha: f64,
}

impl AdapterConfig {
    fn new(
        adapters: &BTreeMap<String, RankAndAlpha>,
        common: RankAndAlpha,
        saved_modules: &BTreeSet<String>,
        modules: &BTreeSet<String>,
    ) -> Self {
        let others = modules
            .iter()
            .filter(|module| !adapters.contains_key(*module));
        let is_taken = |other: &String| adapters.keys().any(|name| has_suffix(other, name));
        let target_modules = match others.into_iter().any(is_taken) {
            true => {
                let names: Vec<_> = adapters.keys().map(|name| regex::escape(name)).collect();
                TargetModules::Pattern(Some(format!("({})", names.join("|"))))
            }
            false => TargetModules::Names(adapters.keys().cloned().collect()),
        };
        let key = |module: &String| format!("^{}", regex::escape(module));
        let special = |differs: fn(RankAndAlpha, RankAndAlpha) -> bool| {
            let special = adapters
                .iter()
                .filter(move |(_, own)| differs(**own, common));
            special.map(|(module, own)| (key(module), *own))
        };
        let ranks = special(|own, common| own.rank != common.rank);
        let alphas = special(|own, common| own.alpha != common.alpha);
        Self {
            peft_type: "LORA".to_owned(),
            base_model_name_or_path: None,
            task_type: None,
            r: common.rank,
            lora_alpha: common.alpha,
            target_modules,
            modules_to_save: (!saved_modules.is_empty())
                .then(|| saved_modules.iter().cloned().collect()),
            rank_pattern: Patterns(ranks.map(|(key, own)| (key, own.rank)).collect()),
            alpha_pattern: Patterns(alphas.map(|(key, own)| (key, own.alpha)).collect()),
            use_rslora: false,
            inference_mode: true,
            others: BTreeMap::new(),
        }
    }

    /// Reads the configuration beside the file.
    fn read(file: &ModelFile) -> Result<Self> {
        let path = file.path().with_file_name(CONFIG_FILE);
        let failed = |error| Error::io("read the configuration of adapters", &path, error);
        let text = std::fs::read(&path).map_err(failed)?;
        let config: Self = serde_json::from_slice(&text).map_err(|error| failed(error.into()))?;
        let named = |name: &&str| {
            let value = config.others.get(*name)?;
            let is_plain = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Bool(true) => *name == "init_lora_weights",
                // These begin with another base; other ways to begin do not matter any more.
                Value::String(text) if *name == "init_lora_weights" => !["pissa", "olora", "corda"]
                    .iter()
                    .any(|other| text.starts_with(other)),
                Value::String(text) => text == "none",
                Value::Array(items) => items.is_empty(),
                Value::Object(entries) => entries.is_empty(),
                Value::Number(_) => false,
            };
            (!is_plain).then(|| format!("`{name}` is {value}"))
        };
        let kind =
            (config.peft_type != "LORA").then(|| format!("`peft_type` is {}", config.peft_type));
        match kind.or_else(|| REFUSED.iter().find_map(named)) {
            None => Ok(config),
            Some(setting) => Err(Error::model(format!(
                "only plain LoRA adapters can be loaded, and in `{}`, {setting}",
                path.display()
            ))),
        }
    }

    /// Returns the factor by which the product of an adapter's factors is scaled.
    fn scale(&self, module: &str, rank: usize) -> Result<f64> {
        let mut alpha = self.lora_alpha;
        for (pattern, own) in &self.alpha_pattern.0 {
            let pattern = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$")).map_err(|error| {
                Error::new(
                    Kind::Model,
                    format!("`alpha_pattern` in `{CONFIG_FILE}` has the key `{pattern}`, which this library cannot read as a regular expression"),
                )
                .with_source(error)
            })?;
            if pattern.is_match(module) {
                alpha = *own;
                break;
            }
        }
        let rank = rank as f64;
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }
}

fn most_common(adapters: &BTreeMap<String, RankAndAlpha>) -> Option<RankAndAlpha> {
    let uses = |own: &RankAndAlpha| adapters.values().filter(|other| *other == own).count();
    adapters.values().copied().max_by_key(uses)
}

/// Returns `true` if the module is called `name` as a whole or from one of its dots on.
fn has_suffix(module: &str, name: &str) -> bool {
    let rest = module.strip_suffix(name);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Returns the module to which a factor belongs.
fn module_of(name: &str) -> &str {
    let name = name.strip_prefix(PEFT_PREFIX).unwrap_or(name);
    name.split_once(".lora_").map_or("", |(module, _)| module)
}

/// The adapters of a model, and what they could adapt.
#[derive(Default)]
struct Survey<'a> {
    known: Option<&'a HashSet<ParamId>>,
    place: FilePath,
    /// The modules that have parameters, and those that have such modules.
    modules: BTreeSet<String>,
    /// The adapted parameters by their paths.
    adapted: BTreeMap<String, Adapted>,
    /// The parameters that PEFT adapts.
    adaptable: Vec<Adaptable>,
    /// The paths and modules of the trained parameters that are not factors of an adapter.
    trained: Vec<(String, String)>,
}

struct Adapted {
    module: String,
    rank: usize,
    names: Option<[String; 2]>,
    is_trained: bool,
}

struct Adaptable {
    path: String,
    module: String,
    /// The names of its factors.
    names: [String; 2],
}

impl<'a> Survey<'a> {
    fn of(model: &dyn DynModule, known: Option<&'a HashSet<ParamId>>) -> Self {
        let mut survey = Self {
            known,
            ..Self::default()
        };
        model.visit(&mut survey);
        survey
    }

    /// Returns the scales of the adapters, by the paths of the parameters that they adapt.
    ///
    /// Burn shows a visitor the factors alone. So the model is merged with zeros for its parameters and ones for the
    /// factors, one element each: the merged elements are the scales.
    fn scales(&self, model: &dyn DynModule) -> BTreeMap<String, f32> {
        if self.adapted.is_empty() {
            return BTreeMap::new();
        }
        let merged = model.boxed().map(&mut ScaleProbe::default()).materialize();
        let mut reader = ScaleReader {
            place: FilePath::default(),
            scales: BTreeMap::new(),
        };
        merged.visit(&mut reader);
        let mut scales = reader.scales;
        scales.retain(|path, _| self.adapted.contains_key(path));
        scales
    }
}

impl ModuleVisitor for Survey<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.place.name(FileLayout::Burn);
        let known = self.known.map(|known| known.contains(&param.id));
        let is_trained = known.unwrap_or_else(|| param.is_require_grad());
        let Some(weight) = self.place.adapted() else {
            let module = self.place.module();
            for (end, _) in module.match_indices('.') {
                self.modules.insert(module[..end].to_owned());
            }
            self.modules.insert(module.clone());
            if let Some(names) = self.place.factor_names().filter(|_| D == 2) {
                self.adaptable.push(Adaptable {
                    path: path.clone(),
                    module: module.clone(),
                    names,
                });
            }
            if is_trained {
                self.trained.push((path, module));
            }
            return;
        };
        if path.ends_with(".a") {
            let rank = match piece_of(param.id) {
                Some(piece) => piece.partition.whole_shape()[1],
                None => param.lazy_shape()[1],
            };
            let adapted = Adapted {
                module: weight.module(),
                rank,
                names: weight.factor_names(),
                is_trained,
            };
            self.adapted.insert(weight.name(FileLayout::Burn), adapted);
        }
    }
}

/// Makes each parameter one element: 1 in adapters, and 0 elsewhere.
#[derive(Default)]
struct ScaleProbe(FilePath);

impl ModuleMapper for ScaleProbe {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.0.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = if self.0.adapted().is_some() { 1.0 } else { 0.0 };
        let value = Tensor::full([1; D], value, (&param.lazy_device(), DType::F32));
        Param::initialized(ParamId::new(), value)
    }
}

struct ScaleReader {
    place: FilePath,
    scales: BTreeMap<String, f32>,
}

impl ModuleVisitor for ScaleReader {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.place.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.place.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.place.name(FileLayout::Burn);
        self.scales.insert(path, param.val().into_scalar());
    }
}
