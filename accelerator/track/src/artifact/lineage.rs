//! Which runs made and used which artifacts.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::record::ArtifactRole;
use crate::run_id::RunId;

/// A version of an artifact, in whatever store. The digest tells apart versions that got one number in two stores.
///
/// ```
/// use accelerator_track::ArtifactId;
///
/// let model = ArtifactId { name: "model".to_owned(), version: 3, digest: "af13".to_owned() };
/// assert_eq!(model.to_string(), "model:v3");
/// ```
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ArtifactId {
    /// The artifact's name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// The hash of its contents.
    pub digest: String,
}

impl fmt::Display for ArtifactId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:v{}", self.name, self.version)
    }
}

/// That a run made or used an artifact.
///
/// ```
/// use accelerator_track::{ArtifactId, ArtifactRole, LineageEdge};
///
/// let artifact = ArtifactId { name: "data".to_owned(), version: 1, digest: "af13".to_owned() };
/// let edge = LineageEdge { role: ArtifactRole::Input, artifact };
/// assert_eq!(format!("{} {}", edge.role, edge.artifact), "input data:v1");
/// ```
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct LineageEdge {
    /// Which of the two.
    pub role: ArtifactRole,
    /// The artifact.
    pub artifact: ArtifactId,
}

/// A run, with what it made and used.
///
/// ```
/// use accelerator_track::{LineageRun, RunId};
///
/// let run = LineageRun { id: RunId::new(), name: "mnist".to_owned(), edges: Vec::new() };
/// assert!(run.edges.is_empty());
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LineageRun {
    /// Its identity.
    pub id: RunId,
    /// Its name.
    pub name: String,
    /// What it made and used.
    pub edges: Vec<LineageEdge>,
}

/// The flow of artifacts between runs: who made what another used.
///
/// ```
/// use accelerator_track::{ArtifactId, ArtifactRole, Lineage, LineageEdge, LineageRun, RunId};
///
/// let run = |name: &str, edges: &[(ArtifactRole, &str)]| LineageRun {
///     id: RunId::new(),
///     name: name.to_owned(),
///     edges: edges
///         .iter()
///         .map(|(role, name)| LineageEdge {
///             role: *role,
///             artifact: ArtifactId { name: (*name).to_owned(), version: 1, digest: String::new() },
///         })
///         .collect(),
/// };
/// let prepare = run("prepare", &[(ArtifactRole::Output, "data")]);
/// let train = run("train", &[(ArtifactRole::Input, "data"), (ArtifactRole::Output, "model")]);
/// let evaluate = run("evaluate", &[(ArtifactRole::Input, "model")]);
/// let id = prepare.id;
///
/// let lineage = Lineage::new([prepare, train, evaluate]);
/// let names: Vec<_> = lineage.downstream(id).iter().map(|run| run.name.as_str()).collect();
/// assert_eq!(names, ["train", "evaluate"]);
/// let model = lineage.artifacts().find(|artifact| artifact.name == "model").unwrap();
/// assert_eq!(lineage.producers(model)[0].name, "train");
/// assert_eq!(lineage.consumers(model)[0].name, "evaluate");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Lineage {
    runs: Vec<LineageRun>,
    by_id: HashMap<RunId, usize>,
    /// By artifact: the runs that made it, and those that used it.
    artifacts: BTreeMap<ArtifactId, [BTreeSet<usize>; 2]>,
}

impl Lineage {
    /// The lineage of these runs. A run that is given twice, as one that was copied, counts once.
    #[must_use]
    pub fn new(runs: impl IntoIterator<Item = LineageRun>) -> Self {
        let mut lineage = Self::default();
        for run in runs {
            let at = *lineage.by_id.entry(run.id).or_insert(lineage.runs.len());
            for edge in &run.edges {
                let of_artifact = lineage.artifacts.entry(edge.artifact.clone()).or_default();
                of_artifact[side(edge.role)].insert(at);
            }
            match lineage.runs.get_mut(at) {
                Some(there) => {
                    there.edges.extend(run.edges);
                    there.edges.sort();
                    there.edges.dedup();
                }
                None => lineage.runs.push(run),
            }
        }
        lineage
    }

    /// The runs, in the order in which they were given.
    #[must_use]
    pub fn runs(&self) -> &[LineageRun] {
        &self.runs
    }

    /// The artifacts that these runs made or used, by name and version.
    pub fn artifacts(&self) -> impl Iterator<Item = &ArtifactId> {
        self.artifacts.keys()
    }

    /// The runs that made an artifact: several where they made the same.
    #[must_use]
    pub fn producers(&self, artifact: &ArtifactId) -> Vec<&LineageRun> {
        self.of(artifact, ArtifactRole::Output)
    }

    /// The runs that used an artifact.
    #[must_use]
    pub fn consumers(&self, artifact: &ArtifactId) -> Vec<&LineageRun> {
        self.of(artifact, ArtifactRole::Input)
    }

    /// The other runs whose artifacts a run used, directly or by way of others, the nearest first.
    #[must_use]
    pub fn upstream(&self, run: RunId) -> Vec<&LineageRun> {
        self.reach(run, ArtifactRole::Input)
    }

    /// The other runs that used a run's artifacts, directly or by way of others, the nearest first.
    #[must_use]
    pub fn downstream(&self, run: RunId) -> Vec<&LineageRun> {
        self.reach(run, ArtifactRole::Output)
    }

    fn of(&self, artifact: &ArtifactId, role: ArtifactRole) -> Vec<&LineageRun> {
        let runs = self
            .artifacts
            .get(artifact)
            .into_iter()
            .flat_map(|runs| &runs[side(role)]);
        runs.map(|at| &self.runs[*at]).collect()
    }

    /// Goes along edges of this role, to runs with the other one. Each run is visited once, so that circles end.
    fn reach(&self, from: RunId, role: ArtifactRole) -> Vec<&LineageRun> {
        let Some(&from) = self.by_id.get(&from) else {
            return Vec::new();
        };
        let mut seen = BTreeSet::from([from]);
        let mut order = vec![from];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            for edge in self.runs[at].edges.iter().filter(|edge| edge.role == role) {
                let others = &self.artifacts[&edge.artifact][1 - side(role)];
                order.extend(others.iter().filter(|other| seen.insert(**other)));
            }
        }
        order[1..].iter().map(|at| &self.runs[*at]).collect()
    }
}

fn side(role: ArtifactRole) -> usize {
    match role {
        ArtifactRole::Output => 0,
        ArtifactRole::Input => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(edges: &[(ArtifactRole, u8)]) -> LineageRun {
        LineageRun {
            id: RunId::new(),
            name: String::new(),
            edges: Vec::from_iter(edges.iter().map(|&(role, version)| LineageEdge {
                role,
                artifact: ArtifactId {
                    name: "a".to_owned(),
                    version: version.into(),
                    digest: String::new(),
                },
            })),
        }
    }

    #[test]
    fn runs_in_a_circle_are_each_reached_once() {
        use ArtifactRole::{Input, Output};
        let [a, b] = [
            run(&[(Input, 2), (Output, 1)]),
            run(&[(Input, 1), (Output, 2), (Input, 2)]),
        ];
        let (first, second) = (a.id, b.id);
        let lineage = Lineage::new([a.clone(), b, a]);
        assert_eq!(lineage.runs().len(), 2);
        let ids = |runs: Vec<&LineageRun>| Vec::from_iter(runs.iter().map(|run| run.id));
        assert_eq!(ids(lineage.upstream(first)), [second]);
        assert_eq!(ids(lineage.downstream(first)), [second]);
        assert!(lineage.upstream(RunId::new()).is_empty());
    }

    proptest! {
        #[test]
        fn upstream_is_downstream_the_other_way(
            edges in prop::collection::vec(prop::collection::vec((any::<bool>(), 0_u8..6), 0..4), 0..8),
        ) {
            let role = |is_output| if is_output { ArtifactRole::Output } else { ArtifactRole::Input };
            let runs = edges.iter().map(|edges| run(&Vec::from_iter(edges.iter().map(|&(is_output, a)| (role(is_output), a)))));
            let lineage = Lineage::new(runs);
            for one in lineage.runs() {
                for other in lineage.runs() {
                    let is_up = lineage.upstream(one.id).iter().any(|run| run.id == other.id);
                    let is_down = lineage.downstream(other.id).iter().any(|run| run.id == one.id);
                    prop_assert_eq!(is_up, is_down);
                }
            }
        }
    }
}
