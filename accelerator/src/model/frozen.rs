//! Hashes of parameters that model files leave out, with which loading compares those of the model.
//!
//! A hash is over the digests of blocks, and sharded parameters are cut between blocks. So each rank hashes its own piece,
//! and the hash does not depend on how the parameter is cut.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use accelerator_collective::ProcessGroup;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};
use crate::core::module::ModulePath;
use crate::core::partition::{BLOCK, piece_of};

/// The hashes of parameters, by their paths.
pub(super) type Hashes = BTreeMap<String, String>;

/// Returns the hashes of the parameters at some paths. If the model is sharded, all ranks call it.
#[track_caller]
pub(super) fn hashes(
    group: &ProcessGroup,
    model: &dyn DynModule,
    paths: &HashSet<String>,
) -> Result<Hashes> {
    let activity = group.activity();
    let mut reader = DigestReader {
        path: ModulePath::default(),
        paths,
        each: &|| activity.keep_alive(),
        parameters: Vec::new(),
    };
    model.visit(&mut reader);
    let mut parameters = reader.parameters;
    if parameters.iter().any(|parameter| parameter.is_piece) {
        let pieces = parameters.iter().filter(|parameter| parameter.is_piece);
        let own: Vec<_> = pieces.map(|piece| piece.digests.clone()).collect();
        let group = group.for_purpose("hash a sharded model");
        let ranks: Vec<Vec<Vec<u8>>> = group.all_gather_object(&own)?;
        let pieces = parameters.iter_mut().filter(|parameter| parameter.is_piece);
        for (at, piece) in pieces.enumerate() {
            let digests = ranks.iter().filter_map(|rank| rank.get(at));
            piece.digests = digests.flatten().copied().collect();
        }
    }
    let hash = |parameter: Digests| (parameter.path.clone(), parameter.hash());
    Ok(parameters.into_iter().map(hash).collect())
}

/// Checks that the model has the parameters with those hashes. If it is sharded, all ranks call it.
#[track_caller]
pub(super) fn check(
    group: &ProcessGroup,
    model: &dyn DynModule,
    expected: &Hashes,
    file: &Path,
) -> Result<()> {
    if expected.is_empty() {
        return Ok(());
    }
    let found = hashes(group, model, &expected.keys().cloned().collect())?;
    let mut others = expected
        .iter()
        .filter(|(path, hash)| found.get(*path) != Some(hash));
    let Some((first, _)) = others.next() else {
        return Ok(());
    };
    Err(Error::model(format!(
        "`{}` was saved without frozen parameters, and {} of the {} differ in this model, for example `{first}`: before \
         loading it, load the base that these adapters were trained on",
        file.display(),
        1 + others.count(),
        expected.len(),
    )))
}

/// The digests of the blocks of a parameter, or of this rank's piece.
struct Digests {
    path: String,
    dtype: DType,
    /// The shape of the whole parameter.
    shape: Vec<usize>,
    digests: Vec<u8>,
    is_piece: bool,
}

impl Digests {
    fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{:?} {:?}", self.dtype, self.shape).as_bytes());
        hasher.update(&self.digests);
        hasher.finalize().to_string()
    }
}

struct DigestReader<'a> {
    path: ModulePath,
    paths: &'a HashSet<String>,
    /// Called for each parameter.
    each: &'a dyn Fn(),
    parameters: Vec<Digests>,
}

impl ModuleVisitor for DigestReader<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.as_str();
        if !self.paths.contains(path) {
            return;
        }
        (self.each)();
        let piece = piece_of(param.id).filter(|piece| piece.partition.is_divided());
        let data = param.val().into_data();
        let dtype = data.dtype();
        let shape = match &piece {
            Some(piece) => piece.partition.whole_shape().to_vec(),
            None => data.shape().to_vec(),
        };
        // A quantised element may have no size of its own; such a parameter is in one piece.
        let blocks = data.bytes().chunks(BLOCK * dtype.size().max(1));
        self.parameters.push(Digests {
            path: path.to_owned(),
            dtype,
            shape,
            digests: blocks
                .flat_map(|block| blake3::hash(block).as_bytes()[..16].to_vec())
                .collect(),
            is_piece: piece.is_some(),
        });
    }
}
