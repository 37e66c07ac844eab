import { useState } from "preact/hooks";

import { post } from "../api";
import type { Session } from "../types";

export function SignIn({ enter, why }: { enter: (session: Session) => void; why: string }) {
  const [token, setToken] = useState("");
  const [error, setError] = useState<string | null>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    setError(null);
    try {
      enter(await post<Session>("/session", { token: token.trim() }));
    } catch (problem) {
      setError(problem instanceof Error ? problem.message : String(problem));
    }
  };
  return (
    <main class="sign-in" id="main" tabIndex={-1}>
      <h1>Sign in</h1>
      <p class="quiet">{why}</p>
      <form onSubmit={(event) => void submit(event)}>
        <label>
          Token
          <input type="password" name="token" autocomplete="current-password" value={token} onInput={(event) => setToken(event.currentTarget.value)} required />
        </label>
        {error && (
          <p class="problem" role="alert">
            {error}
          </p>
        )}
        <button type="submit" class="main">
          Sign in
        </button>
      </form>
      <p class="quiet">
        Make one with <code>fairlane tokens new NAME --scope read</code>, or with <code>--scope operate</code> to pause, cancel and retry here.
      </p>
    </main>
  );
}
