//! Writing and reading of optimizers as Burn's records.

use core::fmt;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device};
use burn_pack::Reader;

use super::sharded::param_shards;
use crate::core::error::{Error, Result};
use crate::core::offload::record_in_file;
use crate::model::{KEEP_THE_ID, Trainable};

const NOTHING: &str = "nothing";

/// The remedy if Burn cannot load state in the type of its parameter.
const HINT: &str = "build the optimizer with `init_fused()`, which loads the state of Adam, AdamW and SGD in the type \
                    in which it was saved, or give the default device the type of the parameters before the first \
                    tensor: `Device::default().configure(…)`";

pub(super) fn size_of(optimizer: &ModuleOptimizer) -> Result<usize> {
    let tensors = reader(bytes_of(optimizer)?)?
        .into_tensors()
        .map_err(unwritable)?;
    Ok(tensors.iter().map(burn_pack::Tensor::byte_len).sum())
}

/// Gives an optimizer the state in a record as it was saved. Burn starts afresh, silently, with what it does not
/// know, and rounds to the float type of its default device.
pub(super) fn load(name: &str, blank: ModuleOptimizer, record: Bytes) -> Result<ModuleOptimizer> {
    let saved = RecordFields::of(&record)?;
    let optimizer = blank
        .from_bytes(record)
        .map_err(|error| unreadable(name, error))?;
    let loaded = RecordFields::of(&bytes_of(&optimizer)?)?;
    if saved.names() != loaded.names() {
        let found = match &*loaded.kept() {
            NOTHING => "none of it".to_owned(),
            kept => kept.to_owned(),
        };
        return Err(Error::checkpoint(format!(
            "the checkpoint does not fit {name}: of each parameter it keeps {}, and this program's optimizer \
                 took {found}, so it is of another kind, or has other settings (SGD with momentum keeps a \
                 velocity, Adam and AdamW two moments); build the optimizer that was saved",
            saved.kept(),
        )));
    }
    let differs = |(field, saved): (&String, &Option<DType>)| {
        let found = loaded.types.get(field)?;
        (found != saved).then_some((field.clone(), (*saved)?, (*found)?))
    };
    match saved.types.iter().find_map(differs) {
        None => Ok(optimizer),
        Some((field, saved_in, found)) => Err(Error::checkpoint(format!(
            "{name} cannot continue: {} was saved in {}, and Burn loads it in {}; {HINT}",
            saved.shown(&field),
            ShownType(saved_in),
            ShownType(found),
        ))),
    }
}

pub(super) fn ids_in(record: &Bytes) -> Result<HashSet<u64>> {
    let fields = RecordFields::of(record)?;
    Ok(fields.ids().collect())
}

/// Returns the saved fields of a parameter and the fields that this optimizer keeps, if they differ: records do not
/// contain settings such as momentum.
///
/// Compares a one-dimensional parameter, such as a bias: for others, some optimizers keep size-dependent fields.
pub(crate) fn other_state(
    optimizer: &ModuleOptimizer,
    record: &Bytes,
    parameter: impl Fn(ParamId) -> Option<Trainable>,
    device: &Device,
) -> Result<Option<(String, String)>> {
    let saved = RecordFields::of(record)?;
    let mut known = saved.types.keys().filter_map(|name| id_of(name));
    let known = known.find_map(|id| parameter(ParamId::from(id)).filter(|it| it.shape.len() == 1));
    let Some(known) = known else {
        return Ok(None);
    };
    let blank = optimizer.clone().load_record(OptimizerRecord::default());
    let Some(fresh) = param_shards::step_sample(&blank, &known, device) else {
        return Ok(None);
    };
    let id = known.id.val();
    let (saved, fresh) = (
        saved.kept_of(id),
        RecordFields::of(&bytes_of(&fresh)?)?.kept_of(id),
    );
    Ok((saved != fresh).then_some((saved, fresh)))
}

/// Refuses state that a program has loaded in another float type than the optimizer keeps it in. `parameter` tells
/// what is known by an id.
pub(crate) fn check_types(
    optimizer: &ModuleOptimizer,
    parameter: impl Fn(ParamId) -> Option<Trainable>,
    device: &Device,
) -> Result<()> {
    let loaded = RecordFields::of(&bytes_of(optimizer)?)?;
    for (field, dtype) in &loaded.types {
        let Some((parameter, dtype)) = id_of(field)
            .and_then(|id| parameter(ParamId::from(id)))
            .zip(*dtype)
        else {
            continue;
        };
        if dtype == parameter.float.dtype() {
            continue;
        }
        // An optimizer may keep state in a type of its own.
        let blank = optimizer.clone().load_record(OptimizerRecord::default());
        let Some(fresh) = param_shards::step_sample(&blank, &parameter, device) else {
            continue;
        };
        let fresh = RecordFields::of(&bytes_of(&fresh)?)?;
        if let Some(Some(expected)) = fresh.types.get(field)
            && *expected != dtype
        {
            return Err(Error::checkpoint(format!(
                "the optimizer has {} in {}, and keeps it in {}, as its parameter is: Burn loads state in \
                     the float type of its default device; {HINT}",
                loaded.shown(field),
                ShownType(dtype),
                ShownType(*expected),
            )));
        }
    }
    Ok(())
}

/// Fails if the state in `record` belongs to other parameters than those with these ids.
pub(crate) fn check_known(name: &str, record: &Bytes, ids: &HashSet<u64>) -> Result<()> {
    let fields = RecordFields::of(record)?;
    let unknown: BTreeSet<_> = fields.ids().filter(|id| !ids.contains(id)).collect();
    let Some(first) = unknown.first() else {
        return Ok(());
    };
    let first = first.to_string();
    Err(Error::misuse(format!(
        "{name} has state for {} parameters (`{}`, …) that no model beside it has: save, and resume, an optimizer \
         together with its model; {KEEP_THE_ID}",
        unknown.len(),
        fields.paths.get(&first).unwrap_or(&first),
    )))
}

struct RecordFields {
    paths: BTreeMap<String, String>,
    /// The types of entries, by name; `None` for numbers that are not tensors.
    types: BTreeMap<String, Option<DType>>,
}

impl RecordFields {
    fn of(record: &Bytes) -> Result<Self> {
        let reader = reader(window(record)?)?;
        let paths = reader.metadata().clone();
        let scalars: Vec<_> = reader.scalars().keys().cloned().collect();
        let tensors = reader.into_tensors().map_err(unwritable)?.into_iter();
        let tensors = tensors.map(|tensor| (tensor.name, Some(tensor.dtype)));
        let scalars = scalars.into_iter().map(|name| (name, None));
        Ok(Self {
            paths,
            types: tensors.chain(scalars).collect(),
        })
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        self.types.keys().filter_map(|name| id_of(name))
    }

    fn names(&self) -> BTreeSet<&String> {
        self.types.keys().collect()
    }

    fn kept(&self) -> String {
        Self::listed(self.types.keys())
    }

    fn kept_of(&self, id: u64) -> String {
        Self::listed(self.types.keys().filter(|name| id_of(name) == Some(id)))
    }

    fn listed<'a>(names: impl Iterator<Item = &'a String>) -> String {
        let fields = names.filter_map(|name| Some(name.split_once('.')?.1));
        // Burn's own note of a parameter's dimensions is in every record.
        let fields: BTreeSet<&str> = fields.filter(|field| *field != "__rank").collect();
        let fields: Vec<_> = fields.iter().map(|field| format!("`{field}`")).collect();
        match &*fields {
            [] => NOTHING.to_owned(),
            fields => fields.join(", "),
        }
    }

    fn shown(&self, field: &str) -> String {
        let (id, field) = field.split_once('.').unwrap_or(("", field));
        let path = self.paths.get(id).map_or(id, String::as_str);
        format!("the state of parameter `{path}` (`{field}`)")
    }
}

fn id_of(field: &str) -> Option<u64> {
    field.split_once('.')?.0.parse().ok()
}

struct ShownType(DType);

impl fmt::Display for ShownType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{:?}", self.0).to_lowercase())
    }
}

pub(super) fn scalars(record: &[u8]) -> Result<Vec<(String, String)>> {
    let reader = reader(Bytes::from_bytes_vec(record.to_vec()))?;
    let scalars = reader.scalars().iter();
    Ok(scalars
        .map(|(name, value)| (name.clone(), format!("{value:?}")))
        .collect())
}

/// The same bytes, without a copy; they must be shared.
pub(super) fn window(record: &Bytes) -> Result<Bytes> {
    record
        .view(0, record.len())
        .map_err(|_| unwritable("its bytes are not shared"))
}

pub(super) fn reader(record: Bytes) -> Result<Reader> {
    Reader::from_bytes(record).map_err(|error| {
        Error::checkpoint("the record of an optimizer or a scheduler cannot be read")
            .with_source(error.to_string())
    })
}

/// Encodes the record in shared bytes, so that names can be read from them without a copy.
pub(super) fn bytes_of(optimizer: &ModuleOptimizer) -> Result<Bytes> {
    let in_file = record_in_file(|path| optimizer.save(path));
    let bytes = in_file.map_or_else(|| optimizer.into_bytes(), Ok);
    bytes.map(Bytes::shared).map_err(unwritable)
}

pub(super) fn unwritable(error: impl core::fmt::Display) -> Error {
    Error::checkpoint("the state of an optimizer cannot be written").with_source(error.to_string())
}

pub(super) fn unreadable(name: &str, error: impl core::fmt::Display) -> Error {
    Error::checkpoint(format!("the state of {name} cannot be read")).with_source(error.to_string())
}

pub(super) fn to_bytes(record: LrSchedulerRecord) -> Result<Vec<u8>> {
    record
        .into_bytes()
        .map(|bytes| bytes.to_vec())
        .map_err(unwritable)
}
