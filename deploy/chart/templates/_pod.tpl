{{/* A pod that serves: alone in a Deployment, or of a LeaderWorkerSet's group. */}}
{{- define "plait.pod" -}}
{{- include "plait.podWith" (list . (include "plait.probes" .)) -}}
{{- end -}}

{{/* A pod of a group that runs ranks alone: nobody asks it by HTTP, and it ends with its leader. */}}
{{- define "plait.podOfRanks" -}}
{{- include "plait.podWith" (list . "") -}}
{{- end -}}

{{- define "plait.podWith" -}}
{{- $probes := index . 1 -}}
{{- with index . 0 -}}
metadata:
  labels:
    {{- include "plait.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .Values.drain.announceSeconds .Values.drain.seconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if include "plait.isGroup" . }}
  # A Secret's files are open to the pod's group, and a node's key may not be; each pod gets its own key alone.
  initContainers:
    - name: keys
      image: {{ include "plait.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [sh, -c, 'umask 077 && cp /secret/public.keys "/secret/node-$LWS_WORKER_INDEX.key" /keys/']
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {cpu: 100m, memory: 32Mi}
      securityContext: {{- include "plait.securityContext" . | nindent 8 }}
      volumeMounts:
        - {name: node-keys-secret, mountPath: /secret, readOnly: true}
        - {name: node-keys, mountPath: /keys}
  {{- end }}
  containers:
    - {{ include "plait.container" (list . $probes) | nindent 6 | trim }}
  volumes:
    {{- include "plait.volumes" . | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "plait.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "plait.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "plait.probes" -}}
# Ready once the model is loaded; liveness counts from then on.
startupProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: {{ add (div (mul .Values.probes.loadSeconds (ternary 2 1 (eq (include "plait.isGroup" .) "true"))) 5) 24 }}
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
# The server gives an overdue step up a minute after /health turns red; this is for one that cannot. While lost ranks
# start again /health is red too, for as long as a start may take.
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ add 12 (ternary 0 (div .Values.probes.loadSeconds 10) (eq .Values.restart.policy "never")) }}
{{- end -}}

{{- define "plait.container" -}}
{{- $probes := index . 1 -}}
{{- with index . 0 -}}
name: plait
image: {{ include "plait.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  {{- include "plait.args" . | nindent 2 }}
{{- if or .Values.env .Values.model.hubTokenSecret }}
env:
  {{- with .Values.model.hubTokenSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: HF_TOKEN}}
  {{- end }}
  {{- with .Values.env }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
ports:
  - {name: http, containerPort: {{ .Values.service.port }}}
  {{- if include "plait.isGroup" . }}
  - {name: launch, containerPort: {{ .Values.nodeKeys.port }}}
  - {name: engine, containerPort: {{ add .Values.nodeKeys.port 1 }}}
  {{- end }}
resources: {{- include "plait.resources" . | nindent 2 }}
{{- with $probes }}
{{ . }}
{{- end }}
{{- if not (include "plait.isGroup" .) }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .Values.drain.announceSeconds }}}
{{- end }}
securityContext: {{- include "plait.securityContext" . | nindent 2 }}
volumeMounts:
  - {name: api-keys, mountPath: /etc/plait, readOnly: true}
  - {name: cache, mountPath: /cache}
  - {name: shm, mountPath: /dev/shm}
  - {name: tmp, mountPath: /tmp}
  {{- if not .Values.model.hub }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if include "plait.isGroup" . }}
  - {name: node-keys, mountPath: /keys}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "plait.args" -}}
- {{ ternary "launch" "serve" (eq (include "plait.isGroup" .) "true") }}
- {{ include "plait.model" . | quote }}
- {{ printf "--host=%s" (ternary "0.0.0.0" "::" (eq .Values.ipFamily "IPv4")) | quote }}
- --port={{ .Values.service.port }}
- --api-key-file=/etc/plait/{{ .Values.apiKeys.key }}
- --load-timeout-seconds={{ .Values.probes.loadSeconds }}
- --tp={{ .Values.parallel.tp }}
- --dp={{ .Values.parallel.dp }}
{{- if not .Values.gpu.enabled }}
- --device=cpu
{{- end }}
{{- if .Values.parallel.dpAttention }}
- --dp-attention
{{- end }}
{{- if ne .Values.restart.policy "never" }}
- --restart={{ .Values.restart.policy }}
- --restart-budget={{ .Values.restart.budget }}
{{- end }}
{{- with .Values.model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- if .Values.monitoring.withoutKey }}
- --metrics-without-key
{{- end }}
{{- if include "plait.isGroup" . }}
- --launcher=lws
- --head=$(LWS_LEADER_ADDRESS):{{ .Values.nodeKeys.port }}
- --keys=/keys
# Pods of a group may start minutes apart: images are pulled, nodes are added.
- --meet-timeout-seconds={{ .Values.probes.loadSeconds }}
# The other pods of a group are deleted after its first: all leave the Service together, by their own word.
- --shutdown-delay-seconds={{ .Values.drain.announceSeconds }}
{{- end }}
{{- range .Values.args }}
- {{ include "plait.word" . | quote }}
{{- end }}
{{- end -}}

{{- define "plait.resources" -}}
requests:
  cpu: {{ .Values.resources.cpu | quote }}
  memory: {{ .Values.resources.memory | quote }}
limits:
  memory: {{ .Values.resources.memory | quote }}
  {{- if .Values.gpu.enabled }}
  {{ .Values.gpu.resource | quote }}: {{ include "plait.ranks" . }}
  {{- end }}
  {{- with .Values.rdma.resource }}
  {{ . | quote }}: {{ $.Values.rdma.count }}
  {{- end }}
{{- end -}}

{{- define "plait.volumes" -}}
- name: api-keys
  secret: {secretName: {{ .Values.apiKeys.secret | quote }}, defaultMode: 0440}
- name: cache
  {{- if .Values.cache.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.claim | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit | quote }}}
  {{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shm | quote }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .Values.model.claim }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}
{{- else if .Values.model.image }}
- name: model
  image: {reference: {{ .Values.model.image | quote }}, pullPolicy: {{ .Values.image.pullPolicy }}}
{{- end }}
{{- if include "plait.isGroup" . }}
- name: node-keys-secret
  secret: {secretName: {{ .Values.nodeKeys.secret | quote }}, defaultMode: 0440}
- name: node-keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
