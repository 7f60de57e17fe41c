use serde::{Deserialize, Serialize};

/// The names and shapes of parameters in a model file.
///
/// | | [`Burn`](Self::Burn) | [`PyTorch`](Self::PyTorch) |
/// |---|---|---|
/// | weight of a `Linear` | `[in, out]` | `[out, in]` |
/// | scale and shift of a norm | `gamma`, `beta` | `weight`, `bias` |
/// | variant of an enum | a part of the path | left out |
///
/// The files say which one they have, so that loading finds out by itself; files of other
/// programs do not, and count as [`Burn`](Self::Burn) unless
/// [`LoadOptions::with_layout`](super::LoadOptions::with_layout) says otherwise.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum FileLayout {
    /// The layout of the module, for Burn programs.
    #[default]
    Burn,
    /// The layout of `torch.nn`, for Python programs: `load_state_dict` takes it.
    PyTorch,
}

impl FileLayout {
    /// Returns its name in files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::PyTorch => "pytorch",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::Burn, Self::PyTorch]
            .into_iter()
            .find(|layout| layout.name() == name)
    }

    /// The `format` by which Hugging Face's tools tell whose tensors they are. They refuse what
    /// they do not know, as they should refuse Burn's layout.
    pub(super) fn format(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::PyTorch => "pt",
        }
    }
}

/// The current place of a visitor or mapper in a module.
#[derive(Debug, Default)]
pub(super) struct FilePath {
    names: Vec<String>,
    /// The kind of container to which each name belongs: `Struct:Linear`, `Vec`, `Enum:Norm`.
    containers: Vec<String>,
}

impl FilePath {
    pub(super) fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    pub(super) fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    /// The name of the parameter here.
    pub(super) fn name(&self, layout: FileLayout) -> String {
        match layout {
            FileLayout::Burn => self.names.join("."),
            FileLayout::PyTorch => self.pytorch_name(),
        }
    }

    /// Tells if the parameter here is one that PyTorch transposes.
    pub(super) fn is_linear_weight(&self) -> bool {
        self.owner() == Some("Struct:Linear") && self.names.last().is_some_and(|n| n == "weight")
    }

    fn pytorch_name(&self) -> String {
        let mut names: Vec<&str> = self
            .names
            .iter()
            .zip(&self.containers)
            .filter(|(_, container)| !container.starts_with("Enum:"))
            .map(|(name, _)| name.as_str())
            .collect();
        if let Some(last) = names.last_mut()
            && self.owner().is_some_and(is_norm)
        {
            *last = match *last {
                "gamma" => "weight",
                "beta" => "bias",
                other => other,
            };
        }
        names.join(".")
    }

    /// The module that the parameter is a field of.
    fn owner(&self) -> Option<&str> {
        let mut containers = self.containers.iter().rev();
        containers
            .find(|container| container.starts_with("Struct:") || container.starts_with("Enum:"))
            .map(String::as_str)
    }
}

fn is_norm(owner: &str) -> bool {
    matches!(
        owner,
        "Struct:BatchNorm"
            | "Struct:GroupNorm"
            | "Struct:InstanceNorm"
            | "Struct:LayerNorm"
            | "Struct:RmsNorm"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(parts: &[(&str, &str)]) -> FilePath {
        let mut place = FilePath::default();
        for (name, container) in parts {
            place.enter(name, container);
        }
        place
    }

    #[test]
    fn pytorch_names_norms_and_skips_variants() {
        let norm = place(&[
            ("blocks", "Struct:Net"),
            ("0", "Vec"),
            ("Batch", "Enum:Norm"),
            ("gamma", "Struct:BatchNorm"),
        ]);
        assert_eq!(norm.name(FileLayout::Burn), "blocks.0.Batch.gamma");
        assert_eq!(norm.name(FileLayout::PyTorch), "blocks.0.weight");
        assert!(!norm.is_linear_weight());
    }

    #[test]
    fn gamma_of_another_module_keeps_its_name() {
        let own = place(&[("gamma", "Struct:Own")]);
        assert_eq!(own.name(FileLayout::PyTorch), "gamma");
    }

    #[test]
    fn the_weight_of_a_linear_is_told_from_others() {
        let weight = |owner| place(&[("x", "Struct:Net"), ("weight", owner)]).is_linear_weight();
        assert!(weight("Struct:Linear"));
        assert!(!weight("Struct:Embedding"));
    }
}
