// An app's page as the README describes it: a token from its address, rows by the bridge, live by its changes.
let token = location.pathname.split("/")[3].slice(1);
addEventListener("message", (event) => {
  if (event.source === parent && event.data?.type === "svc:app-token") token = event.data.token;
});

const list = document.querySelector("ul");
const status = document.querySelector("[role=status]");

async function ask(question) {
  const answer = await fetch("/api/bridge/query", {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify({ app: "notes", table: "notes", ...question }),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${body.code}: ${body.detail}`);
  return body.data;
}

async function show() {
  const rows = await ask({ action: "find" });
  list.replaceChildren(...rows.map(({ title }) => Object.assign(document.createElement("li"), { textContent: title })));
}

async function listen() {
  const answer = await fetch("/api/bridge/changes?app=notes", { headers: { authorization: `Bearer ${token}` } });
  if (!answer.ok) throw new Error(`changes: ${answer.status}`);
  status.textContent = "live";
  for await (const events of answer.body.pipeThrough(new TextDecoderStream())) {
    if (events.includes("data:")) await show();
  }
}

const told = (error) => { status.textContent = error.message; };
document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  ask({ action: "insert", data: { title: form.elements.title.value } }).then(() => form.reset(), told);
});
show().then(listen).catch(told);
