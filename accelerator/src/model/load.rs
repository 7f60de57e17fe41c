use core::fmt;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use accelerator_collective::{Activity, ProcessGroup};
use burn::module::{Module, ModuleMapper, Param, ParamId, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::format::{FileLayout, LoadOptions, PEFT_PREFIX, burn_dtype, file_dtype, quantization};
use super::frozen::{self, Hashes};
use super::layout::{self, Layout};
use super::peft::Attachments;
use super::read::{ModelFile, StoredTensor};
use super::snapshot::{SnapshotEntry, visit_entries};
use super::tied::TiedParameters;
use crate::context::Context;
use crate::core::agreement;
use crate::core::dyn_module::{BoxedModule, DynModule};
use crate::core::error::{Error, Result};
use crate::core::offload::{Offload, in_file};
use crate::core::partition::{give_id, is_sharded, piece_of};

/// Loads what rank 0 opens, and gives the others its values, ids and report. `ids` count on rank 0
/// only.
#[track_caller]
pub(crate) fn load_on_all(
    context: &Context,
    model: BoxedModule,
    open: impl FnOnce(Activity) -> Result<ModelFile>,
    options: &LoadOptions,
    ids: Option<&[u64]>,
) -> Result<(BoxedModule, LoadReport)> {
    const ACTION: &str = "load the model";
    let _offloading = Offload::enter(context.offload.as_ref());
    let group = context.group();
    if group.world_size() == 1 {
        let file = open(group.activity())?;
        let (model, _) = with_adapters(model, &file, options)?;
        let matched = Matched::checked(&model, &file, options, ids)?;
        frozen::check(group, &model, &matched.left_out, file.path())?;
        let report = matched.report.clone();
        let model = matched.load(model, &file, ids, group)?;
        return Ok((model, report));
    }
    let loading = group.for_purpose("load a model");
    let (loaded, report) = if group.rank() == 0 {
        let file = open(group.activity());
        let file = file.as_ref().map_err(Clone::clone);
        let adapted = file
            .clone()
            .and_then(|file| with_adapters(model, file, options));
        let matched = match (&file, &adapted) {
            (Ok(file), Ok((model, _))) => Matched::checked(model, file, options, ids),
            (Err(error), _) | (_, Err(error)) => Err(error.clone()),
        };
        let matched = agreement::send(group, matched)?;
        let (file, (model, attached)) = (file?, adapted?);
        let sent: Vec<bool> = matched.sources.iter().map(Option::is_some).collect();
        let report = matched.report.clone();
        let left_out = matched.left_out.clone();
        let told = (report.clone(), sent, attached.clone(), left_out.clone());
        loading.broadcast_object(Some(&told), 0)?;
        compare(&loading, &model)?;
        let known = frozen::check(&loading, &model, &left_out, file.path());
        agree(group, &left_out, known)?;
        (matched.load(model, file, ids, &loading), report)
    } else {
        agreement::receive(group, ACTION)?;
        let (report, sent, attached, left_out): (_, _, Attachments, Hashes) =
            loading.broadcast_object(None, 0)?;
        let model = attached.attach(model);
        compare(&loading, &model)?;
        // Unless the model is sharded, rank 0's answer alone counts.
        let known = match is_sharded(&model) {
            true => frozen::check(&loading, &model, &left_out, Path::new("the file of rank 0")),
            false => Ok(()),
        };
        agree(group, &left_out, known)?;
        (receive_pieces(model, sent, &loading), report)
    };
    let model = agreement::together(group, loaded, ACTION)?;
    let layout = Layout::of(&model);
    let model = layout::from_rank_zero(group, model, &layout)?;
    Ok((TiedParameters::of(&model).retie(model), report))
}

/// Fails on all ranks if one of them does not have the parameters that the file leaves out. Loading sends pieces after it.
#[track_caller]
fn agree(group: &ProcessGroup, left_out: &Hashes, known: Result<()>) -> Result<()> {
    match left_out.is_empty() {
        true => Ok(()),
        false => agreement::together(group, known, "load the model"),
    }
}

/// Attaches the adapters of PEFT's files that the model does not have.
fn with_adapters(
    model: BoxedModule,
    file: &ModelFile,
    options: &LoadOptions,
) -> Result<(BoxedModule, Attachments)> {
    if agreed_layout(file, options)? != FileLayout::Peft {
        return Ok((model, Attachments::default()));
    }
    let originals = originals(file, FileLayout::Peft, options)?;
    let attached = Attachments::needed_by(&model, file, &originals)?;
    Ok((attached.clone().attach(model), attached))
}

#[track_caller]
fn compare(group: &ProcessGroup, model: &BoxedModule) -> Result<()> {
    let layout = Layout::of(model);
    layout.check_against(&group.all_gather_object(&layout)?)
}

/// Gives a model this rank's pieces of the parameters that rank 0 loads.
#[track_caller]
fn receive_pieces(
    model: BoxedModule,
    sent: Vec<bool>,
    group: &ProcessGroup,
) -> Result<BoxedModule> {
    if !is_sharded(&model) {
        return Ok(model);
    }
    let mut receiver = PieceReceiver {
        failure: None,
        group,
        sent: sent.into_iter(),
    };
    let model = model.map(&mut receiver);
    receiver.failure.map_or(Ok(()), Err)?;
    // Places of a tied parameter may differ in this rank's piece alone.
    Ok(TiedParameters::checked(&model)?.retie(model))
}

/// Gives a model the values and ids that were saved in the file that rank 0 opens.
#[track_caller]
pub(crate) fn restore_values(
    context: &Context,
    model: BoxedModule,
    open: impl FnOnce(Activity) -> Result<ModelFile>,
    saved: &Layout,
) -> Result<BoxedModule> {
    saved.check_saved(&Layout::of(&model))?;
    let options = LoadOptions::new();
    let (model, _) = load_on_all(context, model, open, &options, Some(&saved.ids()))?;
    Ok(model)
}

fn unfit(file: &ModelFile, report: &LoadReport) -> Error {
    let hint = report.hint();
    Error::model(format!(
        "the model file `{}` does not fit this model: {report}{}{}",
        file.path().display(),
        if hint.is_some() { "; " } else { "" },
        hint.unwrap_or_default()
    ))
}

/// The source of each parameter's value, in the order of visits.
struct Matched<'a> {
    sources: Vec<Option<ValueSource<'a>>>,
    report: LoadReport,
    /// The parameters that the file does not have and the model must have.
    left_out: Hashes,
}

struct ValueSource<'a> {
    stored: &'a StoredTensor,
    is_transposed: bool,
}

impl<'a> Matched<'a> {
    fn new(model: &dyn DynModule, file: &'a ModelFile, options: &LoadOptions) -> Result<Self> {
        let layout = agreed_layout(file, options)?;
        let mut matcher = Matcher {
            file,
            layout,
            casts_floats: options.casts_floats,
            originals: originals(file, layout, options)?,
            used: BTreeSet::new(),
            report: LoadReport::default(),
        };
        let mut sources = Vec::new();
        visit_entries(model, &mut |entry| sources.push(matcher.source(&entry)));
        let Matcher {
            layout,
            used,
            mut report,
            ..
        } = matcher;
        let counts = |name: &&str| {
            let ignored = layout == FileLayout::PyTorch && name.ends_with("num_batches_tracked");
            !used.contains(*name) && !ignored
        };
        let unexpected = file.names().filter(counts).map(str::to_owned);
        report.unexpected = unexpected.collect();
        // Parts of a model may lack them as they may lack others.
        let left_out = match options.allows_partial {
            true => Hashes::new(),
            false => file.left_out()?,
        };
        let left_out = left_out.into_iter();
        let left_out: Hashes = left_out
            .map(|(path, hash)| (options.renamed(&path), hash))
            .collect();
        report.missing.retain(|name| !left_out.contains_key(name));
        Ok(Self {
            sources,
            report,
            left_out,
        })
    }

    /// Matches a file that must fit the model, and as many `ids`, if there are any, as the model has parameters and
    /// buffers.
    fn checked(
        model: &dyn DynModule,
        file: &'a ModelFile,
        options: &LoadOptions,
        ids: Option<&[u64]>,
    ) -> Result<Self> {
        let matched = Self::new(model, file, options)?;
        let report = &matched.report;
        let acceptable = match options.allows_partial {
            true => !report.loaded.is_empty(),
            false => report.is_complete(),
        };
        if !acceptable {
            return Err(unfit(file, report));
        }
        if let Some(ids) = ids
            && ids.len() != matched.sources.len()
        {
            return Err(Error::model(format!(
                "{} parameter ids were saved with `{}`, and the model has {} parameters and \
                     buffers",
                ids.len(),
                file.path().display(),
                matched.sources.len()
            )));
        }
        Ok(matched)
    }

    /// Gives the model the file's values, and `ids` if there are any, one per parameter and buffer in order. The values are
    /// the file's bit for bit, unless they are cast. Other ranks receive their pieces of parameters from this one.
    #[track_caller]
    fn load(
        self,
        model: BoxedModule,
        file: &ModelFile,
        ids: Option<&[u64]>,
        group: &ProcessGroup,
    ) -> Result<BoxedModule> {
        let mut writer = FileWriter {
            file,
            group,
            ids: ids.map(|ids| ids.iter().copied()),
            sources: self.sources.into_iter(),
            failure: None,
        };
        let model = model.map(&mut writer);
        if let Some(failure) = writer.failure {
            return Err(failure);
        }
        Ok(TiedParameters::checked(&model)?.retie(model))
    }
}

fn agreed_layout(file: &ModelFile, options: &LoadOptions) -> Result<FileLayout> {
    match (options.layout, file.layout()) {
        (Some(asked), Some(said)) if asked != said => Err(Error::model(format!(
            "the model file `{}` says that it has the layout {said:?}, and {asked:?} was asked \
                 for; leave `with_layout` out",
            file.path().display()
        ))),
        (asked, said) => Ok(asked.or(said).unwrap_or_default()),
    }
}

/// Returns the names in the file, keyed by the names after renaming.
fn originals(
    file: &ModelFile,
    layout: FileLayout,
    options: &LoadOptions,
) -> Result<BTreeMap<String, String>> {
    let mut originals = BTreeMap::new();
    for name in file.names() {
        let renamed = match layout {
            // PEFT saves embeddings beside their adapters under this name.
            FileLayout::Peft => options.renamed(&name.replace(".base_layer.", ".")),
            FileLayout::Burn | FileLayout::PyTorch => options.renamed(name),
        };
        let renamed = match layout {
            FileLayout::Peft if !renamed.starts_with(PEFT_PREFIX) => {
                format!("{PEFT_PREFIX}{renamed}")
            }
            _ => renamed,
        };
        if let Some(other) = originals.insert(renamed.clone(), name.to_owned()) {
            return Err(Error::config(format!(
                "renaming makes `{other}` and `{name}` of the model file `{}` the same: `{}`",
                file.path().display(),
                renamed
            )));
        }
    }
    Ok(originals)
}

struct Matcher<'a> {
    file: &'a ModelFile,
    layout: FileLayout,
    casts_floats: bool,
    originals: BTreeMap<String, String>,
    used: BTreeSet<String>,
    report: LoadReport,
}

impl<'a> Matcher<'a> {
    fn source(&mut self, entry: &SnapshotEntry) -> Option<ValueSource<'a>> {
        let name = entry.name(self.layout).to_owned();
        let found = match self.originals.get(&name) {
            Some(original) => self.file.find(original),
            // A tensor of that name was renamed; the name may still be an alias of another tensor.
            None => self.file.find(&name).filter(|(kept, _)| *kept != name),
        };
        let Some((original, stored)) = found else {
            if entry.is_required(self.layout) {
                self.report.missing.push(name);
            }
            return None;
        };
        self.used.insert(original.to_owned());
        let (wanted, found) = (quantization(entry.dtype), self.file.quantization(original));
        if wanted.as_deref() != found {
            let shown = |scheme: Option<&str>, dtype: String| {
                scheme.map_or(dtype, |scheme| format!("quantised by {scheme}"))
            };
            self.report.mistyped.push(Mistyped {
                name,
                expected: shown(wanted.as_deref(), dtype_name(entry.dtype)),
                found: shown(found, stored.dtype.to_string().to_lowercase()),
            });
            return None;
        }
        let expected = entry.shape(self.layout);
        if stored.shape != expected {
            self.report.misshapen.push(Misshapen {
                name,
                expected,
                found: stored.shape.clone(),
            });
            return None;
        }
        if !self.fits(stored.dtype, entry.dtype) {
            self.report.mistyped.push(Mistyped {
                name,
                expected: dtype_name(entry.dtype),
                found: stored.dtype.to_string().to_lowercase(),
            });
            return None;
        }
        self.report.loaded.push(name);
        Some(ValueSource {
            stored,
            is_transposed: entry.is_transposed(self.layout),
        })
    }

    fn fits(&self, stored: safetensors::Dtype, wanted: DType) -> bool {
        match burn_dtype(stored) {
            _ if file_dtype(wanted) == stored => true,
            Some(found) => self.casts_floats && found.is_float() && wanted.is_float(),
            None => false,
        }
    }
}

fn dtype_name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// A mapper that visits parameters in the order of [`Matched`].
struct FileWriter<'a, I> {
    file: &'a ModelFile,
    group: &'a ProcessGroup,
    ids: Option<I>,
    sources: std::vec::IntoIter<Option<ValueSource<'a>>>,
    /// The first failure; later parameters keep their values.
    failure: Option<Error>,
}

impl<'a, I: Iterator<Item = u64>> FileWriter<'a, I> {
    /// Gives the parameter its id, and returns the source of its new values.
    fn next<T: Parameter>(&mut self, param: &mut Param<T>) -> Option<ValueSource<'a>> {
        if let Some(id) = self.ids.as_mut().and_then(Iterator::next) {
            give_id(param, ParamId::from(id));
        }
        self.sources.next().flatten()
    }

    fn read(&mut self, source: &ValueSource<'_>) -> Option<TensorData> {
        if self.failure.is_some() {
            return None;
        }
        self.succeeded(self.file.read(source.stored))
    }

    fn succeeded<T>(&mut self, outcome: Result<T>) -> Option<T> {
        outcome
            .map_err(|error| self.failure.get_or_insert(error))
            .ok()
    }

    fn map<const D: usize, K: Basic>(
        &mut self,
        mut param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let source = self.next(&mut param);
        let Some(data) = source.and_then(|source| self.read(&source)) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let new = Tensor::<D, K>::from_data(data, (&old.device(), old.dtype()));
        Param::from_mapped_value(id, mapper.on_load(new), mapper)
    }
}

impl<I: Iterator<Item = u64>> ModuleMapper for FileWriter<'_, I> {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let piece = piece_of(param.id);
        let Some(source) = self.next(&mut param) else {
            return param;
        };
        let (id, old, mapper) = param.consume();
        let (device, dtype) = (old.device(), old.dtype());
        let data = self.read(&source).map(|data| {
            if let DType::QFloat(_) = dtype {
                let saved = mapper.on_save(old.clone());
                let data = TensorData::from_bytes(data.into_bytes(), saved.shape(), saved.dtype());
                let stored = Tensor::<D>::from_data(data, (&device, saved.dtype()));
                return mapper.on_load(stored).into_data();
            }
            let stored = Tensor::<D>::from_data(data.convert_dtype(dtype), (&device, dtype));
            let value = match source.is_transposed {
                true => stored.transpose(),
                false => mapper.on_load(stored),
            };
            // Through the host once more if the values were transposed: they then lie in memory as
            // an optimizer's step leaves them, and sums over them come out the same to the last bit.
            value.into_data().convert_dtype(dtype)
        });
        if let Some(piece) = piece {
            // Other ranks wait for it, even if it could not be read.
            let whole = data.as_ref().map(|data| &data.bytes()[..]);
            let bytes = piece.scatter(self.group, dtype.size(), whole);
            let param = Param::from_mapped_value(id, old, mapper);
            return match self.succeeded(bytes) {
                Some(bytes) => piece.write(param, bytes),
                None => param,
            };
        }
        let new = match data {
            Some(data) => Tensor::<D>::from_data(in_file(data), (&device, dtype))
                .set_require_grad(old.is_require_grad()),
            None => old,
        };
        Param::from_mapped_value(id, new, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.map(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.map(param)
    }
}

/// Receives this rank's pieces of the parameters that rank 0 loads, in the same order.
struct PieceReceiver<'a> {
    /// The first failure; later parameters keep their values.
    failure: Option<Error>,
    group: &'a ProcessGroup,
    /// One for each parameter and buffer: `true` if rank 0 has values for it.
    sent: std::vec::IntoIter<bool>,
}

impl ModuleMapper for PieceReceiver<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_sent = self.sent.next() == Some(true) && self.failure.is_none();
        let Some(piece) = piece_of(param.id).filter(|_| is_sent) else {
            return param;
        };
        let width = param.val().dtype().size();
        match piece.scatter(self.group, width, None) {
            Ok(bytes) => piece.write(param, bytes),
            Err(error) => {
                self.failure = Some(error);
                param
            }
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.sent.next();
        param
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.sent.next();
        param
    }
}

const SHOWN: usize = 10;

/// A report of which parts of a model were in a file. Its `Display` form lists the first ten of each kind.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The parameters and buffers that have the file's values, by their names in the model.
    pub loaded: Vec<String>,
    /// The parameters that the file does not have; they keep their values.
    pub missing: Vec<String>,
    /// The names in the file that the model does not have.
    pub unexpected: Vec<String>,
    /// The parameters that the file has in another shape; they keep their values.
    pub misshapen: Vec<Misshapen>,
    /// The parameters that the file has in another element type; they keep their values.
    pub mistyped: Vec<Mistyped>,
}

/// A tensor that a file has in another shape than the model.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Misshapen {
    /// Its name in the model.
    pub name: String,
    /// The shape that the model needs, in the file's layout.
    pub expected: Vec<usize>,
    /// The shape in the file.
    pub found: Vec<usize>,
}

/// A tensor that a file has in another element type than the model.
///
/// ```
/// use accelerator::model::LoadOptions;
/// use accelerator::prelude::*;
/// use burn::nn::{Linear, LinearConfig};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.safetensors");
/// # let header = br#"{"bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"weight":{"dtype":"BF16","shape":[2,1],"data_offsets":[4,8]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat())?;
///
/// let accelerator = Accelerator::new()?;
/// let model: Linear = LinearConfig::new(2, 1).init(&accelerator.device());
/// // A file whose weight is in bf16.
/// let (model, report) = accelerator.load_model_with(model, &path, &LoadOptions::new().allow_partial())?;
/// let [weight] = &report.mistyped[..] else { panic!("the bias has its type") };
/// assert_eq!((&*weight.name, &*weight.expected, &*weight.found), ("weight", "f32", "bf16"));
/// # let _: Linear = model;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Mistyped {
    /// Its name in the model.
    pub name: String,
    /// The type in the model.
    pub expected: String,
    /// The type in the file.
    pub found: String,
}

impl LoadReport {
    /// Returns `true` if the file had every parameter as the model needs it, and nothing else.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.misshapen.is_empty()
            && self.mistyped.is_empty()
    }

    fn parameters(&self) -> usize {
        self.loaded.len() + self.missing.len() + self.misshapen.len() + self.mistyped.len()
    }

    pub(super) fn hint(&self) -> Option<String> {
        self.prefix_hint().or_else(|| self.layout_hint())
    }

    fn prefix_hint(&self) -> Option<String> {
        let first = self.missing.first()?;
        let prefix = self.unexpected.iter().find_map(|name| {
            let prefix = name.strip_suffix(first.as_str())?;
            prefix.ends_with('.').then_some(prefix)
        })?;
        let found = self
            .missing
            .iter()
            .filter(|name| self.unexpected.contains(&format!("{prefix}{name}")))
            .count();
        Some(format!(
            "`LoadOptions::strip_prefix({prefix:?})` would find {found} of the missing"
        ))
    }

    fn layout_hint(&self) -> Option<String> {
        let turned = self
            .misshapen
            .iter()
            .any(|tensor| tensor.expected.iter().rev().eq(&tensor.found));
        let renamed = self.missing.iter().any(|name| {
            name.strip_suffix("gamma")
                .is_some_and(|owner| self.unexpected.contains(&format!("{owner}weight")))
        });
        (turned || renamed).then(|| {
            "it looks like PyTorch's layout: try `LoadOptions::with_layout(FileLayout::PyTorch)`"
                .to_owned()
        })
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} parameters and buffers loaded",
            self.loaded.len(),
            self.parameters()
        )?;
        let quoted = |name: &String| format!("`{name}`");
        list(f, "missing from the file", &self.missing, quoted)?;
        list(f, "unexpected in the file", &self.unexpected, quoted)?;
        list(f, "misshapen", &self.misshapen, |tensor| {
            format!(
                "`{}` (expected {:?}, found {:?})",
                tensor.name, tensor.expected, tensor.found
            )
        })?;
        list(f, "of another type", &self.mistyped, |tensor| {
            format!(
                "`{}` (expected {}, found {})",
                tensor.name, tensor.expected, tensor.found
            )
        })
    }
}

fn list<T>(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    items: &[T],
    shown: impl Fn(&T) -> String,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = items.iter().take(SHOWN).map(shown).collect();
    write!(f, "; {} {what}: {}", items.len(), names.join(", "))?;
    match items.len().checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(more) => write!(f, " and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use std::path::Path;

    use burn::nn::{Linear, LinearConfig};

    use super::*;
    use crate::model::{FileNames, ModelSnapshot, SaveOptions};

    #[test]
    fn saved_ids_come_back_with_the_values() {
        let accelerator = crate::Accelerator::new().unwrap();
        let line = || -> Linear { LinearConfig::new(2, 3).init(&accelerator.device()) };
        let saved = line();
        let folder = tempfile::tempdir().unwrap();
        let group = accelerator.shared.context.group();
        let snapshot = ModelSnapshot::of(group, &saved, &HashSet::new()).unwrap();
        let ids = Layout::of(&saved).ids();
        // On another thread, as saving beside training does.
        let write = move || {
            let names = FileNames::new("weights.safetensors");
            snapshot.write(&names, &SaveOptions::new(), &mut |name, emit| {
                let mut file = std::fs::File::create(folder.path().join(name)).unwrap();
                emit(&mut file).map_err(|error| Error::io("write", Path::new(name), error))
            })?;
            Ok::<_, Error>(folder)
        };
        let folder = std::thread::spawn(write).join().unwrap().unwrap();
        let path = folder.path().join("weights.safetensors");
        let options = LoadOptions::new();
        let (loaded, report) = load_on_all(
            &accelerator.shared.context,
            BoxedModule::new(line()),
            |activity| ModelFile::open(&path, activity),
            &options,
            Some(&ids),
        )
        .unwrap();
        assert!(report.is_complete());
        let loaded: Linear = loaded.into_model();
        assert_eq!(loaded.weight.id, saved.weight.id);
        assert_eq!(
            loaded.weight.val().into_data(),
            saved.weight.val().into_data()
        );
        let error = load_on_all(
            &accelerator.shared.context,
            BoxedModule::new(line()),
            |activity| ModelFile::open(&path, activity),
            &options,
            Some(&ids[1..]),
        );
        assert!(error.unwrap_err().is_model());
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn ten_of_each_kind_are_shown_with_the_count() {
        let report = LoadReport {
            loaded: names(&["a"]),
            missing: (0..12).map(|i| format!("m{i}")).collect(),
            misshapen: vec![Misshapen {
                name: "w".to_owned(),
                expected: vec![2, 3],
                found: vec![4],
            }],
            ..LoadReport::default()
        };
        let text = report.to_string();
        assert!(text.starts_with("1 of 14 parameters"), "{text}");
        assert!(text.contains("12 missing from the file: `m0`"), "{text}");
        assert!(text.contains("`m9` and 2 more"), "{text}");
        assert!(!text.contains("`m10`"), "{text}");
        assert!(text.contains("`w` (expected [2, 3], found [4])"), "{text}");
        assert!(!report.is_complete());
    }

    #[test]
    fn a_prefix_is_guessed_from_the_names() {
        let report = LoadReport {
            missing: names(&["a.weight", "b.weight", "c"]),
            unexpected: names(&["net.b.weight", "net.a.weight"]),
            ..LoadReport::default()
        };
        let hint = report.hint().unwrap();
        assert!(hint.contains("\"net.\"") && hint.contains("2 of"), "{hint}");
    }

    #[test]
    fn pytorchs_layout_is_guessed_from_norms() {
        let report = LoadReport {
            missing: names(&["norm.gamma"]),
            unexpected: names(&["norm.weight"]),
            ..LoadReport::default()
        };
        assert!(report.hint().unwrap().contains("PyTorch"));
    }
}
