//! The statements that change rows. Each changes all that it says or nothing, in one round trip.

use serde_json::value::RawValue;

use super::{Changed, Group, Place, Plan, Target, Wrong, wrong};
use crate::host::gateway::apps::{Column, Origin};
use crate::host::gateway::bridge::fields::{Fields, elements};
use crate::host::gateway::bridge::filter::{Filter, escaped};
use crate::host::gateway::bridge::param::Param;
use crate::host::gateway::bridge::request::{Change, Resolution, Returning, Which};
use crate::host::gateway::bridge::sql::Sql;
use crate::host::gateway::bridge::value::{bind, expansion};
use crate::http::problem::FieldError;

const MOST_ROWS: usize = 1000;
/// As many rows as a change gives back.
const MOST_RETURNED: i64 = 1000;
/// What the rows that an insert gives back may have more than its request: the names of all columns, and digits.
const MAX_ADDED_BYTES: usize = 4 * 1024 * 1024;
/// Mistakes that one answer names.
const MOST_MISTAKES: usize = 20;

/// A row's values in the table's order, so that the order in which a client writes them makes no new statement.
type Values<'t> = Vec<(&'t Column, Param)>;

/// Whether values are for a row that is made or for one that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    New,
    Existing,
}

enum Verb<'t> {
    Update(Values<'t>),
    Delete,
}

impl<'t> Place<'_, 't> {
    pub(super) fn insert(&self, data: &RawValue) -> Result<Plan<'t>, Wrong> {
        let values = self.with_id(self.values(data, "/data", For::New)?);
        let mut sql = self.insertion(values);
        sql.push(" RETURNING ").row_object(&self.table.columns);
        Ok(Plan::Made(sql))
    }

    /// Rows that name the same columns are made by one statement, from an array for each column: a column that a row does
    /// not name gets its default, as an insert of that row would give it.
    pub(super) fn insert_many(&self, rows: &RawValue) -> Result<Plan<'t>, Wrong> {
        let rows = elements(rows).filter(|rows| (1..=MOST_ROWS).contains(&rows.len()));
        let rows = rows.ok_or_else(|| vec![wrong("/rows", "must be an array of 1 to 1000 objects")])?;
        let mut added_bytes = rows.len() * self.names_bytes();
        let mut gathered: Vec<Gathered<'t>> = Vec::new();
        let mut mistakes = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            match self.values(row, &format!("/rows/{index}"), For::New) {
                Ok(values) => {
                    added_bytes +=
                        values.iter().map(|(column, param)| expansion(column.kind, param)).sum::<usize>();
                    Gathered::add(&mut gathered, index, self.with_id(values));
                }
                Err(wrong) => mistakes.extend(wrong),
            }
            if added_bytes > MAX_ADDED_BYTES {
                mistakes.push(wrong(
                    "/rows",
                    "would be answered with more than 4 MiB of names and digits: send fewer rows at a time",
                ));
                break;
            }
            if mistakes.len() >= MOST_MISTAKES {
                break;
            }
        }
        if !mistakes.is_empty() {
            mistakes.truncate(MOST_MISTAKES);
            return Err(mistakes);
        }
        let groups = gathered.into_iter().map(|gathered| self.group(gathered)).collect();
        Ok(Plan::ManyMade(groups))
    }

    /// About as much as each row of an answer has beside its values.
    fn names_bytes(&self) -> usize {
        self.table.columns.iter().map(|column| column.name.as_str().len() + "\"\":null,".len()).sum()
    }

    fn group(&self, gathered: Gathered<'t>) -> Group {
        let mut sql = Sql::new("INSERT INTO ");
        self.name(&mut sql);
        sql.push(" (").list(&gathered.columns, ", ", |sql, (column, _)| {
            sql.name(&column.name);
        });
        sql.push(") SELECT * FROM unnest(").list(gathered.columns, ", ", |sql, (column, values)| {
            sql.bind_many(column.kind, values);
        });
        sql.push(") RETURNING ").row_object(&self.table.columns);
        Group { sql, rows: gathered.rows }
    }

    /// A row that is there is locked by either resolution, so that `otherwise` finds it in the same transaction.
    pub(super) fn upsert(
        &self,
        data: &RawValue,
        on_conflict: &RawValue,
        resolution: Resolution,
    ) -> Result<Plan<'t>, Wrong> {
        let target = self.named(on_conflict, "/onConflict").map_err(|wrong| vec![wrong])?;
        let values = self.values(data, "/data", For::New)?;
        let mut key = Vec::with_capacity(target.len());
        let mut mistakes = Vec::new();
        for column in &target {
            // NULL conflicts with nothing: the row would be made again each time.
            match values.iter().find(|(given, param)| given == column && !matches!(param, Param::Null(_))) {
                Some((_, param)) => key.push(Filter::equals(column, param.clone())),
                None => mistakes.push(wrong(
                    format!("/data/{}", column.name),
                    "is required, and not null: onConflict names it",
                )),
            }
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let given: Vec<&Column> = values.iter().map(|(column, _)| *column).collect();
        let mut write = self.insertion(self.with_id(values));
        write.push(" ON CONFLICT (").list(&target, ", ", |sql, column| {
            sql.name(&column.name);
        });
        write.push(") DO UPDATE SET \"updated_at\" = ");
        match resolution {
            Resolution::Merge => {
                write.push("now()");
                let taken = |column: &&&Column| column.origin == Origin::Declared && !target.contains(column);
                for column in given.iter().filter(taken) {
                    write.push(", ").name(&column.name).push(" = excluded.").name(&column.name);
                }
            }
            Resolution::Ignore => {
                write.push("\"t\".\"updated_at\" WHERE FALSE");
            }
        }
        write.push(" RETURNING ").row_object(&self.table.columns);
        let otherwise = (resolution == Resolution::Ignore).then(|| {
            let mut sql = Sql::new("SELECT ");
            sql.row_object(&self.table.columns).push(" FROM ");
            self.name(&mut sql);
            sql.push(" WHERE ");
            Filter::All(key).write(&mut sql);
            sql
        });
        Ok(Plan::Upserted { write, otherwise })
    }

    pub(super) fn update(&self, change: &Change<'_>, data: &RawValue) -> Result<Plan<'t>, Wrong> {
        let values = self.values(data, "/data", For::Existing)?;
        if values.is_empty() {
            return Err(vec![wrong("/data", "must name a column")]);
        }
        self.change(Verb::Update(values), change).map_err(|wrong| vec![wrong])
    }

    pub(super) fn delete(&self, change: &Change<'_>) -> Result<Plan<'t>, FieldError> {
        self.change(Verb::Delete, change)
    }

    fn change(&self, verb: Verb<'t>, change: &Change<'_>) -> Result<Plan<'t>, FieldError> {
        let (filter, target) = match change.which {
            Which::Id(id) => (self.by_id(id)?, Target::Id),
            Which::Filter(raw) => (self.filter(Some(raw))?, Target::Filter),
        };
        if filter.is_empty() {
            return Err(wrong("/filter", "must not be empty"));
        }
        let returning = change.returning;
        let at_most =
            bound(change.max_affected, target, returning).map_err(|why| wrong("/maxAffected", why))?;
        let sql = match at_most {
            None => self.direct(verb, &filter, returning),
            Some(most) => self.bounded(verb, &filter, returning, most),
        };
        Ok(Plan::Changed(Changed { sql, target, returning, at_most }))
    }

    fn direct(&self, verb: Verb<'t>, filter: &Filter<'_>, returning: Returning) -> Sql {
        let mut sql = Sql::default();
        self.verb(&mut sql, verb, None);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        if returning == Returning::Rows {
            sql.push(" RETURNING ").row_object(&self.table.columns);
        }
        sql
    }

    /// Locks the rows that match, one more than the bound at the most, and changes them only if they are not too many.
    fn bounded(&self, verb: Verb<'t>, filter: &Filter<'_>, returning: Returning, most: i64) -> Sql {
        let mut sql = Sql::new("WITH \"hit\" AS MATERIALIZED (SELECT \"t\".\"id\" FROM ");
        self.name(&mut sql);
        sql.push(" WHERE ");
        filter.write(&mut sql);
        sql.push(" LIMIT ").placeholder(Param::Int8(most.saturating_add(1)));
        sql.push(" FOR UPDATE), \"done\" AS (");
        self.verb(&mut sql, verb, Some("\"hit\""));
        sql.push(" WHERE \"t\".\"id\" = \"hit\".\"id\" AND (SELECT count(*) FROM \"hit\") <= ");
        sql.placeholder(Param::Int8(most)).push(" RETURNING ");
        let hits = "SELECT count(*) FROM \"hit\"";
        match returning {
            Returning::Number => {
                sql.push("TRUE) SELECT (").push(hits).push("), (SELECT count(*) FROM \"done\")");
            }
            Returning::Rows => {
                sql.row_object(&self.table.columns)
                    .push(" AS \"row\") SELECT \"h\".\"count\", \"d\".\"row\" FROM (");
                sql.push(hits).push(") AS \"h\" LEFT JOIN \"done\" AS \"d\" ON TRUE");
            }
        }
        sql
    }

    /// The head of a change; `beside` is what it is joined with.
    fn verb(&self, sql: &mut Sql, verb: Verb<'t>, beside: Option<&'static str>) {
        match verb {
            Verb::Update(values) => {
                sql.push("UPDATE ");
                self.name(sql);
                sql.push(" SET ").list(values, ", ", |sql, (column, param)| {
                    sql.name(&column.name).push(" = ").bind(column.kind, param);
                });
                sql.push(", \"updated_at\" = now()");
                if let Some(beside) = beside {
                    sql.push(" FROM ").push(beside);
                }
            }
            Verb::Delete => {
                sql.push("DELETE FROM ");
                self.name(sql);
                if let Some(beside) = beside {
                    sql.push(" USING ").push(beside);
                }
            }
        }
    }

    /// `INSERT INTO … VALUES …`, to be gone on with.
    fn insertion(&self, values: Values<'t>) -> Sql {
        let mut sql = Sql::new("INSERT INTO ");
        self.name(&mut sql);
        sql.push(" (").list(&values, ", ", |sql, (column, _)| {
            sql.name(&column.name);
        });
        sql.push(") VALUES (").list(values, ", ", |sql, (column, param)| {
            sql.bind(column.kind, param);
        });
        sql.push(")");
        sql
    }

    /// The id comes from here unless the client chose one: in time order, so that the index grows at one end.
    fn with_id(&self, mut values: Values<'t>) -> Values<'t> {
        if let Some(id) = self.table.column("id").filter(|id| values.iter().all(|(c, _)| c != id)) {
            values.insert(0, (id, Param::Uuid(uuid::Uuid::now_v7())));
        }
        values
    }

    fn values(&self, data: &RawValue, place: &str, purpose: For) -> Result<Values<'t>, Wrong> {
        let fields = Fields::of(data).map_err(|why| vec![wrong(place, why)])?;
        let mut mistakes = Vec::new();
        let mut given: Vec<Option<Param>> = vec![None; self.table.columns.len()];
        for (name, raw) in &fields.0 {
            let mut mistake = |why: &str| mistakes.push(wrong(format!("{place}/{}", escaped(name)), why));
            let found = self.table.columns.iter().position(|column| column.name.as_str() == name);
            let Some(index) = found else {
                mistake("is not a column of this table");
                continue;
            };
            let column = &self.table.columns[index];
            if !column.is_insertable() {
                mistake("is set by the database");
                continue;
            }
            if purpose == For::Existing && column.origin == Origin::BuiltIn {
                mistake("never changes");
                continue;
            }
            match bind(column.kind, raw) {
                Ok(Param::Null(_)) if !column.is_nullable() => mistake("must not be null"),
                Ok(param) => given[index] = Some(param),
                Err(why) => mistake(why),
            }
        }
        if !mistakes.is_empty() {
            mistakes.truncate(MOST_MISTAKES);
            return Err(mistakes);
        }
        Ok(self.table.columns.iter().zip(given).filter_map(|(column, p)| Some((column, p?))).collect())
    }
}

/// Rows of one set of columns, turned into a list of values for each column.
struct Gathered<'t> {
    columns: Vec<(&'t Column, Vec<Param>)>,
    rows: Vec<usize>,
}

impl<'t> Gathered<'t> {
    fn add(all: &mut Vec<Self>, row: usize, values: Values<'t>) {
        let same = |gathered: &&mut Self| {
            gathered.columns.len() == values.len()
                && gathered.columns.iter().zip(&values).all(|((known, _), (column, _))| known == column)
        };
        match all.iter_mut().find(same) {
            Some(gathered) => {
                gathered.rows.push(row);
                for ((_, list), (_, param)) in gathered.columns.iter_mut().zip(values) {
                    list.push(param);
                }
            }
            None => {
                let columns = values.into_iter().map(|(column, param)| (column, vec![param])).collect();
                all.push(Self { columns, rows: vec![row] });
            }
        }
    }
}

/// How many rows may be changed. One row by its id needs no bound; rows are given back within one always.
fn bound(raw: Option<&RawValue>, target: Target, returning: Returning) -> Result<Option<i64>, &'static str> {
    let asked = match raw {
        None => None,
        Some(raw) => {
            let number =
                raw.get().parse::<i64>().ok().filter(|number| (0..=i64::from(u32::MAX)).contains(number));
            Some(number.ok_or("must be an integer, and not negative")?)
        }
    };
    match (target, returning, asked) {
        (Target::Id, _, None | Some(1..)) => Ok(None),
        (Target::Filter, Returning::Rows, Some(most)) if most > MOST_RETURNED => {
            Err("must be at most 1000 with returning")
        }
        (Target::Filter, Returning::Rows, None) => Ok(Some(MOST_RETURNED)),
        (_, _, asked) => Ok(asked),
    }
}
